"""Rows from every source to the trainer: splits, several datasets, limits, and what is refused before any download."""

import json

import datasets
import pytest

from tests.conftest import record_of
from train import rows as train_rows
from train import sources
from train.config import Config
from train.console import Refusal

GOOD = {"instruction": "Name a fruit.", "output": "A plum."}


def write(file, *rows):
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def texts(name="train", **settings):
    """The texts of the rows that the settings give, and the account."""
    config = Config(_env_file=None, **{key: str(value) for key, value in settings.items()})
    account = train_rows.Account(name)
    shaped = list(train_rows.shaped(train_rows.named(config)[name], config, account))
    return [row["text"] for _, row in shaped], account


@pytest.fixture
def letters(tmp_path):
    return write(tmp_path / "letters.jsonl", *({"text": letter} for letter in "abcdefghij"))


@pytest.mark.parametrize(
    ("split", "expected"),
    [("train", "abcdefghij"), ("train[:3]", "abc"), ("train[7:]", "hij"), ("train[-2:]", "ij"), ("train[:20%]", "ab"),
     ("train[:1]+train[9:]", "aj")],
)  # fmt: skip
def test_slices(letters, split, expected):
    assert "".join(texts(DATASET=letters, DATASET_SPLIT=split)[0]) == expected


def test_a_folder_has_splits_and_names_what_it_leaves_out(tmp_path, capsys):
    for split in ("train", "validation"):
        write(tmp_path / f"rows/{split}.jsonl", {"text": split})
    (tmp_path / "rows/extra.csv").write_text("text\nextra\n")
    assert texts(DATASET=tmp_path / "rows")[0] == ["train"]
    assert texts("eval", DATASET=tmp_path / "rows", EVAL_DATASET=tmp_path / "rows")[0] == ["validation"]
    assert "left out: extra.csv" in capsys.readouterr().err


def test_a_folder_may_have_configurations(tmp_path):
    for name in ("red", "green"):
        write(tmp_path / f"rows/{name}.jsonl", {"text": name})
    header = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("red", "green"))
    (tmp_path / "rows/README.md").write_text(f"---\nconfigs:\n{header}---\n")
    rows = {"DATASET": tmp_path / "rows", "EVAL_DATASET": tmp_path / "rows"}
    assert texts(**rows, DATASET_CONFIG="green")[0] == ["green"]
    what, fix = refusal(tmp_path, **rows, DATASET_CONFIG="green")
    assert "red" in what and "green" in what and "EVAL_DATASET_CONFIG" in fix
    assert texts("eval", **rows, EVAL_DATASET_CONFIG="red", EVAL_DATASET_SPLIT="train")[0] == ["red"]


def test_a_folder_that_datasets_saved_is_read_too(tmp_path):
    rows = datasets.Dataset.from_list([{"text": letter} for letter in "abc"])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "two")
    assert "".join(texts(DATASET=tmp_path / "one", DATASET_SPLIT="train[1:]")[0]) == "bc"
    assert texts(DATASET=tmp_path / "two", DATASET_SPLIT="test")[0] == ["b"]


def test_images_that_training_does_not_use_are_not_decoded(tmp_path):
    table = datasets.Dataset.from_list([{"text": "a", "image": {"bytes": b"no image", "path": None}}])
    table.cast_column("image", datasets.Image(decode=False)).cast_column("image", datasets.Image()).save_to_disk(
        tmp_path / "saved"
    )
    assert texts(DATASET=tmp_path / "saved")[0] == ["a"]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_the_hub_come_through_datasets(tmp_path, monkeypatch, streaming):
    """load_dataset itself reads a local folder here; what is asked of it is what the Hub would be asked."""
    folder, real, asked = tmp_path / "hub", datasets.load_dataset, []
    write(folder / "train.jsonl", *({"text": letter} for letter in "abcdef"))

    def load(name, *arguments, **options):
        asked.append((name, *arguments, options["revision"], options["streaming"]))
        return real(str(folder), *arguments, **{**options, "revision": None})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found, account = texts(DATASET="who/what", DATASET_REVISION="v1", MAX_ROWS=4, STREAMING=streaming)
    assert "".join(found) == "abcd" and account.read == 4
    assert asked == [("who/what", None, "v1", streaming)]


def test_weights_say_how_often_rows_are_seen(letters, tmp_path):
    digits = write(tmp_path / "digits.jsonl", *({"text": digit} for digit in "01234"))
    found, account = texts(DATASET=f"{letters}, {digits}", DATASET_WEIGHTS="0.5,2")
    assert "".join(found) == "bdfhj0011223344"
    assert account.read == 15 and account.left_out == {"DATASET_WEIGHTS=0.5": 5}
    found, _ = texts(DATASET=f"{letters},{digits}", MAX_ROWS=3, DATASET_SPLIT="train[1:],train")
    assert "".join(found) == "bcd012"


def test_equal_rows_are_left_out_on_request(tmp_path):
    file = write(tmp_path / "rows.jsonl", {"text": "a", "id": 1}, {"text": "a", "id": 2}, {"text": "b"})
    assert "".join(texts(DATASET=file)[0]) == "aab"
    found, account = texts(DATASET=file, DEDUPLICATE="true")
    assert "".join(found) == "ab"
    assert account.left_out.total() == 1 and not account.dropped


def refusal(tmp_path, **settings):
    config = Config(_env_file=None, **{key: str(value) for key, value in settings.items()})
    with pytest.raises(Refusal) as found:
        train_rows.survey(config)
    assert "\n" not in found.value.what
    return found.value.what, found.value.fix


def test_an_unknown_shape_shows_the_row_the_columns_and_the_settings(tmp_path):
    file = write(tmp_path / "rows.jsonl", {"Question": "x" * 200, "Best Answer": "A plum."})
    what, fix = refusal(tmp_path, DATASET=file)
    assert f"{file}, row 1 (line 1)" in what and "Question, Best Answer" in what
    assert "x" * 50 in what and "x" * 81 not in what
    assert "PROMPT_COLUMN" in fix and "COMPLETION_COLUMN" in fix and "instruction and output" in fix


@pytest.mark.parametrize(("bad", "given", "refused"), [(10, {}, False), (11, {}, True), (1, {"MAX_DROPPED_FRACTION": 0}, True),
                                                       (11, {"MAX_DROPPED_FRACTION": 0.5}, False)])  # fmt: skip
def test_too_many_unusable_rows_are_a_refusal(tmp_path, bad, given, refused):
    file = write(tmp_path / "rows.jsonl", *[GOOD] * 30, *[GOOD | {"output": ""}] * bad)
    if not refused:
        assert train_rows.survey(Config(_env_file=None, DATASET=str(file), **given))["train"].used == 30
        return
    what, fix = refusal(tmp_path, DATASET=file, **given)
    assert f"{bad} of {30 + bad} train rows" in what and "empty answer" in what and "31" in what
    assert "MAX_DROPPED_FRACTION" in fix


def test_reasons_that_quote_the_rows_stay_few(tmp_path):
    turns = [{"messages": [{"role": f"plum{n}", "content": "Hi"}]} for n in range(50)]
    what, _ = refusal(tmp_path, DATASET=write(tmp_path / "rows.jsonl", *turns))
    assert (
        "dropped 50" in what and "30 × another reason" in what and what.count("plum") == 21
    )  # and the first row's own


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("databricks/dolly-15k", "databricks/databricks-dolly-15k"),
        ("./none.jsonl", "path that exists"),
        ("none.jsonl", "path that exists"),
        ("/", "folder with the rows"),
        ("rows.docx", ".jsonl"),
        ("broken.jsonl", "line"),
        ("empty.jsonl", "with rows"),
    ],
)
def test_names_and_files_that_cannot_be_read_say_the_way_out(tmp_path, name, said):
    write(tmp_path / "rows.docx", 7)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert said in refusal(tmp_path, DATASET=name)[1]


def test_rows_are_refused_before_the_model_is_looked_for(train, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": "b\n')
    result = train(DATASET=broken, MODEL_ID="nobody/nothing")
    assert result.status == 2 and "broken.jsonl, line 2" in result.err and "nobody" not in result.err


@pytest.mark.parametrize("missing", ["./none.jsonl", "databricks/dolly-15k"])
def test_evaluation_rows_that_are_not_there_name_their_own_setting(tmp_path, letters, missing):
    what, fix = refusal(tmp_path, DATASET=letters, EVAL_DATASET=missing)
    assert "EVAL_DATASET" in fix and missing in what


def test_a_refusal_of_every_row_shows_the_first(tmp_path):
    file = write(tmp_path / "rows.jsonl", {"instruction": {"0": "Add."}, "output": {"0": "3"}})
    what, fix = refusal(tmp_path, DATASET=file)
    assert "row 1 (line 1)" in what and '{"instruction": {"0": "Add."}' in what and "PROMPT_COLUMN" in fix


def test_columns_that_are_not_used_are_named(run, tiny_model, tmp_path):
    file = write(tmp_path / "rows.jsonl", GOOD | {"category": "fruit"})
    assert "columns not used: category" in run("check", "--data", MODEL_ID=tiny_model, DATASET=file).err


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"EVAL_FRACTION": 0.5}, 2, "leaves none to train on"),
        ({"LONG_ROWS": "drop", "MAX_LENGTH": 8}, 2, "LONG_ROWS=cut"),
    ],
)
def test_check_data_refuses_what_train_would(run, tiny_model, tmp_path, settings, status, said):
    result = run("check", "--data", MODEL_ID=tiny_model, DATASET=write(tmp_path / "rows.jsonl", GOOD), **settings)
    assert result.status == status and said in result.out


def test_an_unknown_split_is_refused_with_those_there_are(letters, tmp_path):
    what, fix = refusal(tmp_path, DATASET=letters, DATASET_SPLIT="plum")
    assert "plum" in what and "train" in what and "DATASET_SPLIT" in fix


def test_the_run_says_and_records_what_became_of_the_rows(train, tmp_path):
    file = write(tmp_path / "rows.jsonl", *[GOOD] * 3, GOOD | {"output": 42}, GOOD | {"output": None})
    result = train(DATASET=file, MAX_STEPS=1, EVAL_FRACTION=0.25)
    assert result.status == 0, result.err
    before_training = result.err.partition("trained:")[0]
    for said in ("5 read", "dropped 1 of 5", "lengths in tokens p50", "supervised tokens", "⟦A plum.<|end|>⟧", "JSON"):
        assert said in before_training
    train_account, eval_account = (record_of(tmp_path / "out")[f"{name}_rows"] for name in ("train", "eval"))
    assert (train_account["read"], train_account["used"], eval_account["used"]) == (5, 3, 1)
    assert train_account["dropped"] == {"empty answer": 1}
    assert 0 < train_account["supervised"] < train_account["tokens"]
    assert set(train_account["length_percentiles"]) == {"p50", "p90", "p95", "p99", "p100"}


def test_check_data_does_only_this_without_weights(run, own_model, tmp_path):
    (own_model / "model.safetensors").unlink()
    file = write(tmp_path / "rows.jsonl", *[GOOD] * 3)
    result = run("check", "--data", MODEL_ID=own_model, DATASET=file, OUTPUT_DIR=tmp_path / "out")
    assert result.status == 0, result.out
    assert "3 read, 3 used" in result.err and "⟦A plum.<|end|>⟧" in result.err and "tokens learned" in result.out
    assert not (tmp_path / "out").exists()
    assert run("check", "--data", MODEL_ID=own_model, DATASET="none.jsonl").status == 2


def test_only_the_default_dataset_is_cut_to_the_courses_rows_and_only_by_default():
    def splits(**settings):
        return [source.split for source in sources.to_train(Config(_env_file=None, **settings))]

    assert splits() == ["train[:1000]"]
    assert splits(MAX_ROWS=5000) == splits(DATASET="rows.jsonl") == ["train"]
