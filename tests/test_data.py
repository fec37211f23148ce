"""Rows of every known shape, from every kind of file, and what is said about the rest."""

import json
from pathlib import Path

import pandas
import pytest

from train import data
from train.console import Refusal

ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Say hi.", "input": "", "output": "None"},
]
SHAREGPT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
]


def shaped(row: dict) -> dict:
    _, to_shape = data.shaper(list(row))
    return to_shape(row)


def chat(*contents: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ALPACA[0], chat("Add.\n\n1 and 2", "3")),
        (ALPACA[1], chat("Say hi.", "None")),
        ({"instruction": "Add.", "context": None, "response": "3", "category": "sum"}, chat("Add.", "3")),
        ({"Question": "Add.", "Answer": "3"}, chat("Add.", "3")),
        ({"prompt": "Add.", "response": "3"}, chat("Add.", "3")),
        ({"prompt": "Add: ", "completion": "3"}, {"prompt": "Add: ", "completion": "3"}),
        (
            {"prompt": chat("Add.")["messages"], "completion": [{"role": "assistant", "content": "3"}]},
            chat("Add.", "3"),
        ),
        (chat("Hi", "Hello", "Bye", "See you"), chat("Hi", "Hello", "Bye", "See you")),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                    {"role": "assistant", "content": "Hello"},
                ]
            },
            chat("Hi", "Hello"),
        ),
        ({"TEXT": "A plum."}, {"text": "A plum."}),
        ({"instruction": "Add.", "output": 3}, chat("Add.", "3")),
    ],
)
def test_known_shapes(row, expected):
    assert shaped(row) == expected


def test_sharegpt_roles_become_the_templates_roles():
    roles = [message["role"] for message in shaped({"conversations": SHAREGPT})["messages"]]
    assert roles == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Add.", "output": " "}, "empty answer"),
        ({"instruction": None, "output": "3"}, "empty question"),
        ({"messages": []}, "no turns"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no assistant turn"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]},
            "empty assistant turn",
        ),
        ({"messages": [{"role": "plum", "content": "Hi"}]}, 'role "plum"'),
        ({"text": None}, "empty text"),
        ({"text": ["a", "b"]}, "a list where text belongs"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row, reason):
    with pytest.raises(data.UnusableRow, match=reason):
        shaped(row)


def test_unknown_columns_are_refused_with_the_columns_found():
    with pytest.raises(Refusal, match="Best Answer") as refusal:
        data.shaper(["row_id", "Best Answer"])
    assert "instruction and output" in refusal.value.fix


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_files_of_every_kind_give_the_same_rows(tmp_path, kind):
    file = tmp_path / f"rows.{kind}"
    table = pandas.DataFrame(ALPACA)
    if kind == "json":
        file.write_text(json.dumps(ALPACA, indent=1))
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ALPACA))
    elif kind == "csv":
        table.to_csv(file, index=False)
    else:
        table.to_parquet(file)
    loaded = data.load(str(file), "train")
    assert [shaped(row) for row in loaded] == [chat("Add.\n\n1 and 2", "3"), chat("Say hi.", "None")]
    assert len(data.load(str(file), "train[:1]")) == 1


@pytest.mark.parametrize("answers", [("007", "010"), ("3.10", "1e5"), ("True", "False"), ("None", "NA")])
def test_cells_of_a_csv_file_stay_as_they_are_written(tmp_path, answers):
    file = tmp_path / "rows.csv"
    file.write_text(",instruction,output\n" + "".join(f"{n},Say it.,{a}\n" for n, a in enumerate(answers)))
    assert [shaped(row)["messages"][-1]["content"] for row in data.load(str(file), "train")] == list(answers)


def test_dates_of_a_json_file_stay_as_they_are_written(tmp_path):
    answers = ["2024-01-02T10:00:00Z", "2024-01-03T10:00:00Z"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": "When?", "answer": answer}) + "\n" for answer in answers))
    assert [shaped(row) for row in data.load(str(file), "train")] == [chat("When?", answer) for answer in answers]


def test_a_folder_with_splits(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    assert data.load(str(tmp_path), "train")[0]["text"] == "train"
    assert data.load(str(tmp_path), None)[0]["text"] == "validation"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("databricks/dolly-15k", "databricks/databricks-dolly-15k"),
        ("./none.jsonl", "path that exists"),
        ("rows.docx", ".jsonl"),
        ("broken.jsonl", "JSON"),
        ("empty.jsonl", "JSON"),
    ],
)
def test_names_and_files_that_cannot_be_read_say_the_way_out(tmp_path, name, said):
    Path("rows.docx").write_text("x")
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    Path("empty.jsonl").write_text("")
    with pytest.raises(Refusal) as refusal:
        data.load(name, "train")
    assert said in refusal.value.fix


def test_evaluation_rows_that_are_not_there_name_their_own_setting(train, tmp_path):
    for missing in ("./none.jsonl", "databricks/dolly-15k"):
        result = train(EVAL_DATASET=missing)
        assert result.status == 2
        assert "EVAL_DATASET" in result.err and missing in result.err


def test_an_unknown_split_is_refused(rows):
    with pytest.raises(Refusal, match="plum") as refusal:
        data.load(str(rows), "plum")
    assert "DATASET_SPLIT" in refusal.value.fix
