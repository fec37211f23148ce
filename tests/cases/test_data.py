"""Cases 01 to 16: files of rows as people have them."""

import json
import re

import pytest

from tests.cases.conftest import answer_in, names_row

TOOLS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("number", "dataset", "rows"),
    [
        (1, "train.jsonl", 8),  # an array
        (2, "train.json", 8),  # lines
        (4, "train.jsonl", 5),  # objects over several lines
        (6, "data", 8),  # a column that is null throughout the first file
        (6, "tags", 6),  # an unused column that is empty throughout the first file
        (7, "train.jsonl", 6),  # a byte order mark
        (7, "train.json", 4),
        (8, "train.csv", 7),
        (9, "train.json", 6),
        (11, "case.jsonl", 6),
        (11, "pair.jsonl", 6),
        (16, "train-and-val", 6),
    ],
)
def test_the_file_gives_all_its_rows(case, number, dataset, rows):
    record, _ = case(number).trained(DATASET=f"./{dataset}")
    assert (record["train_rows"]["read"], record["train_rows"]["used"]) == (rows, rows)
    assert record["train_rows"]["dropped"] == {}


@pytest.mark.parametrize("verb", ["train", "check"])
def test_03_a_broken_line_is_shown_with_its_number(case, run, verb):
    broken = case(3)
    if verb == "train":
        said = broken.refused(DATASET="./train.jsonl")
    else:
        given = {"MODEL_ID": "./model", "DATASET": "./train.jsonl", "ALLOW_CPU": "true", "OUTPUT_DIR": "./out"}
        result = run("check", "--data", **given)
        assert result.status == 2 and "Traceback" not in result.err
        said = result.out + result.err
    line = (broken.folder / "train.jsonl").read_text().splitlines()[6]
    assert "train.jsonl" in said and "line 7" in said
    assert line[:80] in said
    assert re.search("string|quot", said.replace(line[:80], ""), re.IGNORECASE)  # the parser's reason


def test_05_numbers_and_truth_values_are_learned_as_json_writes_them(case):
    mixed = case(5)
    _, said = mixed.trained(DATASET="./train.jsonl")
    learned = [answer_in(row.learned[-1]) for row in mixed.rows]
    assert "42" in learned and "true" in learned and "True" not in learned
    assert re.search(r"warning: .*\b2\b", said)


def test_05_parts_of_text_are_joined(case):
    parts = case(5)
    parts.trained(DATASET="./parts.jsonl")
    assert any("<|im_start|>user\nWhat colour is a ripe orange?<|im_end|>" in row.text for row in parts.rows)
    assert not any("type" in row.text for row in parts.rows)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_07_a_byte_order_mark_changes_nothing(case, name):
    marked = case(7)
    with_mark, _ = marked.trained(DATASET=f"./{name}")
    file = marked.folder / name
    file.write_bytes(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    without, _ = marked.trained(DATASET=f"./{name}")
    assert with_mark["data_sha256"] != without["data_sha256"]  # there was one
    assert with_mark["train_rows"] == without["train_rows"]
    assert with_mark["first_loss"] == without["first_loss"]


def test_07_utf16_is_named(case):
    said = case(7).refused(DATASET="./utf16.jsonl")
    assert "utf16.jsonl" in said and "UTF-16" in said and "UTF-8" in said


def test_08_newlines_and_quotes_stay_in_their_cell(case):
    table = case(8)
    table.trained(DATASET="./train.csv")
    learned = [answer_in(row.learned[-1]) for row in table.rows]
    assert "apple\nplum\nlime" in learned and 'The sign reads "OPEN, 9-5".' in learned
    assert any('Quote the sign that reads "OPEN, 9-5".' in row.text for row in table.rows)
    assert sum("x,y" in row.text for row in table.rows) == 1


def test_08_lines_that_windows_ended_stay_in_their_cell(case):
    table = case(8)
    record, _ = table.trained(DATASET="./crlf.csv")
    assert record["train_rows"]["used"] == 1
    assert answer_in(table.rows[0].learned[-1]).split() == list("lime")


def test_08_words_that_look_like_nothing_are_answers(case):
    table = case(8)
    record, _ = table.trained(DATASET="./na-words.csv")
    assert record["train_rows"]["used"] == 3
    assert sorted(answer_in(row.learned[-1]) for row in table.rows) == ["NA", "None", "null"]


def test_08_a_field_too_many_is_named(case):
    said = case(8).refused(DATASET="./ragged.csv")
    assert "ragged.csv" in said and "line 3" in said
    assert re.search(r"\b2\b.*\b3\b", said.replace("line 3", ""))  # expected and found


def test_09_roles_are_those_of_the_template(case):
    chats = case(9)
    record, _ = chats.trained(DATASET="./train.json")
    sample = record["train_rows"]["sample"]
    assert "<|im_start|>user\nWhat colour is a ripe" in sample
    assert re.search(r"<\|im_start\|>assistant\s*⟦\s*A ripe \w+ is usually \w+\.", sample)
    roles = [re.findall(r"<\|im_start\|>(\w+)\n", row.text) for row in chats.rows]
    assert sorted(roles) == 3 * [["system", "user", "assistant"]] + 3 * [["user", "assistant"]]


def test_10_an_empty_input_leaves_no_trace(case):
    instructions = case(10)
    record, _ = instructions.trained(DATASET="./train.jsonl")
    assert record["train_rows"]["used"] == 6
    prompts = [row.text.partition("<|im_end|>")[0].removeprefix("<|im_start|>user\n") for row in instructions.rows]
    assert sorted(len(prompt.splitlines()) > 1 for prompt in prompts) == 5 * [False] + [True]
    assert all(prompt == prompt.strip() and prompt.startswith("What colour is a ripe") for prompt in prompts)
    assert sum("It is still on the tree." in prompt for prompt in prompts) == 1
    assert not any(word in prompt for word in ("None", "null") for prompt in prompts)


def test_11_unknown_columns_are_listed_with_the_shapes_and_the_settings_that_map_them(case):
    said = case(11).refused(DATASET="./train.jsonl")
    for name in ("Question", "Best Answer", "row_id", "messages", "instruction", "text"):
        assert name in said
    assert "PROMPT_COLUMN" in said and "COMPLETION_COLUMN" in said


def test_11_settings_map_columns(case):
    columns = case(11)
    given = {"PROMPT_COLUMN": "Question", "COMPLETION_COLUMN": "Best Answer"}
    record, _ = columns.trained(DATASET="./train.jsonl", **given)
    assert record["train_rows"]["used"] == 6
    assert "A ripe apple is usually red." in [answer_in(row.learned[-1]) for row in columns.rows]
    assert "Best" in columns.refused(DATASET="./train.jsonl", **given | {"COMPLETION_COLUMN": "Best"})


def test_12_rows_without_a_question_or_an_answer_are_dropped_and_named(case):
    turns = case(12)
    record, said = turns.trained(DATASET="./train.jsonl")
    rows = record["train_rows"]
    assert (rows["read"], rows["used"], sum(rows["dropped"].values())) == (8, 3, 5)
    assert all(reason in said for reason in rows["dropped"])
    for number in (2, 3, 4, 5, 6):
        assert names_row(said, number)
    assert len([line for line in said.splitlines() if line.startswith("warning: ") and "dropped" in line]) == 1


def test_12_rows_that_were_let_go_are_refused_where_a_limit_is_given(case):
    said = case(12).refused(DATASET="./train.jsonl", MAX_DROPPED_FRACTION=0.05)
    assert "MAX_DROPPED_FRACTION" in said and "5 of 8" in said


@pytest.mark.parametrize(("file", "rows"), [("all-bad.jsonl", 2), ("zero-bytes.jsonl", 0), ("header-only.csv", 0)])
def test_12_a_file_without_a_usable_row_is_refused(case, file, rows):
    said = case(12).refused(DATASET=f"./{file}")
    assert file in said
    assert f"read {rows}" in said and f"dropped {rows}" in said


def test_13_one_very_long_row_is_told_and_takes_no_more_than_the_rest(case):
    long = case(13)
    record, said = long.trained(DATASET="./train.jsonl", MAX_LENGTH=512)
    rows = record["train_rows"]
    assert (rows["used"], rows["cut"]) == (10, 1)
    assert rows["longest"] > 8000
    assert "1 of 10" in said and str(rows["longest"]) in said.replace(",", "") and "512" in said
    assert max(len(row.ids) for row in long.rows) == 512


def test_14_tool_calls_that_the_template_would_leave_out_are_refused(case):
    said = case(14).refused(DATASET="./train.jsonl")
    assert "tool_calls" in said and "template" in said


def test_14_tool_calls_keep_their_own_arguments(case):
    tools = case(14)
    (tools.folder / "model/chat_template.jinja").write_text(TOOLS_TEMPLATE)
    tools.trained(DATASET="./train.jsonl")
    rows = [json.loads(line) for line in (tools.folder / "train.jsonl").read_text().splitlines()]
    calls = [json.dumps(row["messages"][1]["tool_calls"][0]["function"], sort_keys=True) for row in rows]
    seen = [json.loads(call) for row in tools.rows for call in re.findall(r"<call>(.*?)</call>", row.text)]
    assert sorted(json.dumps(call, sort_keys=True) for call in seen) == sorted(calls)
    assert all("<call>" in row.learned[0] for row in tools.rows)


def test_15_a_loading_script_is_refused_and_never_run(case):
    script = case(15)
    file = script.folder / "orchard/orchard.py"
    file.write_text(f"open({str(script.folder / 'ran')!r}, 'w')\n" + file.read_text())
    said = script.refused(DATASET="./orchard")
    assert "script" in said and "Parquet" in said and "JSONL" in said
    assert not (script.folder / "ran").exists()


def test_16_a_folder_without_the_split_lists_those_it_has(case):
    splits = case(16)
    said = splits.refused(DATASET="./only-test")
    assert "DATASET_SPLIT" in said and re.search(r"\btest\b", said.replace("only-test", ""))


def test_16_the_split_named_is_taken(case):
    splits = case(16)
    assert splits.trained(DATASET="./only-test", DATASET_SPLIT="test")[0]["train_rows"]["used"] == 5
    record, _ = splits.trained(DATASET="./train-and-val", EVAL_DATASET="./train-and-val")
    assert (record["train_rows"]["used"], record["eval_rows"]["used"]) == (6, 2)


def test_16_configurations_are_listed_and_the_one_named_is_taken(case):
    configs = case(16)
    green, _ = configs.trained(DATASET="./two-configs", DATASET_CONFIG="green")
    assert green["train_rows"]["used"] == len((configs.folder / "two-configs/green.jsonl").read_text().splitlines())
    said = configs.refused(DATASET="./two-configs")
    assert "red" in said and "green" in said and "DATASET_CONFIG" in said


def test_16_files_of_another_kind_are_not_left_out_in_silence(case):
    mixed = case(16)
    result = mixed.train(DATASET="./mixed-folder")
    if result.status == 0:
        assert "extra.csv" in result.err and len(mixed.rows) == 3
    else:
        assert result.status == 2 and ".jsonl" in result.err and ".csv" in result.err
