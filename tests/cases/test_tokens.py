"""Cases 17 to 24: what tokenizers and chat templates make of the rows."""

import json
import re

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.cases.conftest import answer_in, names_row
from tests.conftest import WEIGHTS

BOS, EOS = "<s>", "</s>"


def chats_of(file) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("dataset", ["train.jsonl", "text.jsonl"])
def test_17_the_end_is_learned_where_padding_shares_its_token(case, dataset):
    shared = case(17)
    record, _ = shared.trained(DATASET=f"./{dataset}", PER_DEVICE_TRAIN_BATCH_SIZE=4)
    assert record["train_rows"]["used"] == len(shared.rows) == 8
    assert len({len(row.ids) for row in shared.rows}) > 1  # so there was padding
    assert all(row.learned[-1].endswith("<|im_end|>") for row in shared.rows)
    weights = load_file(shared.folder / "out" / WEIGHTS)
    sizes = {"q_proj": (16, 16), "k_proj": (16, 8), "v_proj": (16, 8), "o_proj": (16, 16)}  # of the one layer
    assert sum(weight.numel() for weight in weights.values()) == 16 * sum(map(sum, sizes.values()))


@pytest.mark.parametrize("dataset", ["train.jsonl", "alpaca.jsonl"])
def test_18_a_model_without_template_gets_the_plain_one_and_keeps_it(case, dataset):
    base = case(18)
    record, said = base.trained(DATASET=f"./{dataset}")
    assert record["train_rows"]["used"] == 8
    assert said.count("no chat template") == 1
    saved = AutoTokenizer.from_pretrained(base.folder / "out/adapter").chat_template
    assert saved and "<|im_start|>" in saved
    assert all("<|im_start|>user\nWhat colour" in row.text for row in base.rows)


def test_19_each_row_has_one_bos(case):
    double = case(19)
    record, _ = double.trained(DATASET="./train.jsonl")
    assert AutoTokenizer.from_pretrained("./model")("a")["input_ids"].count(256) == 1  # and the template prints one too
    assert len(double.rows) == 8
    assert all(row.text.startswith(BOS) and row.text.count(BOS) == 1 for row in double.rows)
    assert record["train_rows"]["sample"].count(BOS) == 1


def test_20_rows_whose_answers_are_all_cut_off_are_refused(case):
    cut = case(20)
    prompts = [json.loads(line)["prompt"] for line in (cut.folder / "all-rows.jsonl").read_text().splitlines()]
    said = cut.refused(**cut.settings_of("run.env"))
    assert "read 8, dropped 8" in said and "64" in said
    assert str(max(map(len, prompts))) in said.replace(",", "")  # a token is a byte here


def test_20_some_rows_whose_answers_are_cut_off_are_dropped(case):
    cut = case(20)
    record, said = cut.trained(**cut.settings_of("run.env") | {"DATASET": "./some-rows.jsonl", "MAX_STEPS": 1})
    assert record["train_rows"]["used"] == 6
    assert "2 of 8" in said
    assert all(row.learned for row in cut.rows)


@pytest.mark.parametrize(("dataset", "answers"), [("train.jsonl", 1), ("multi-turn.jsonl", 2)])
def test_21_every_answer_and_nothing_else_is_learned(case, dataset, answers):
    chats = case(21)
    record, said = chats.trained(DATASET=f"./{dataset}")
    given = [[turn["content"] for turn in c if turn["role"] == "assistant"] for c in chats_of(chats.folder / dataset)]
    assert sorted([answer_in(part) for part in row.learned] for row in chats.rows) == sorted(given)
    assert {len(row.learned) for row in chats.rows} == {answers}
    rows = record["train_rows"]
    assert rows["tokens"] == sum(len(row.ids) for row in chats.rows)
    figures = said.replace(",", "")
    assert str(rows["supervised"]) in figures and str(rows["tokens"]) in figures
    marked = re.findall("⟦(.*?)⟧", rows["sample"], re.DOTALL)
    assert [answer_in(part) for part in marked] in given
    assert 0 < rows["supervised"] < rows["tokens"] / 2


def test_21_every_token_is_learned_where_that_is_asked_for(case):
    chats = case(21)
    record, _ = chats.trained(DATASET="./train.jsonl", COMPLETION_ONLY_LOSS="false")
    assert record["train_rows"]["supervised"] == record["train_rows"]["tokens"]


def test_22_a_system_turn_is_folded_into_the_question_or_refused(case):
    strict = case(22)
    result = strict.train(DATASET="./system.jsonl")
    assert "Traceback" not in result.err
    if result.status == 0:
        assert len(strict.rows) == 8
        assert all(re.match(r"(<s>)?\[user\]You answer in one line\.\s+What", row.text) for row in strict.rows)
        assert len([line for line in result.err.splitlines() if "system" in line]) == 1
    else:
        assert result.status == 2 and names_row(result.err, 1) and "This template has no system role" in result.err


@pytest.mark.parametrize("dataset", ["two-users.jsonl", "starts-with-assistant.jsonl"])
def test_22_turns_out_of_order_are_named(case, dataset):
    strict = case(22)
    result = strict.train(DATASET=f"./{dataset}")
    assert result.status in (0, 2) and "Traceback" not in result.err
    assert names_row(result.err, 6) and "take turns" in result.err
    assert "TemplateError" not in result.err
    assert len(strict.rows) == (0 if result.status else 6 if dataset == "two-users.jsonl" else 5)


def test_23_what_is_cut_is_told_and_gets_no_false_end(case):
    long = case(23)
    record, said = long.trained(DATASET="./train.jsonl")
    rows = record["train_rows"]
    assert (rows["used"], rows["cut"]) == (8, 1)
    assert rows["longest"] > 10_000 and rows["tokens_lost"] == rows["longest"] - 512
    share = 100 * rows["tokens_lost"] / (rows["tokens"] + rows["tokens_lost"])
    assert any(abs(float(told) - share) < 1 for told in re.findall(r"(\d+(?:\.\d+)?) ?%", said))
    assert "1 of 8" in said and "512" in said
    longest = max(long.rows, key=lambda row: len(row.ids))
    assert len(longest.ids) == 512
    assert not longest.text.endswith((EOS, "<|im_end|>"))
    assert longest.learned[-1][-1] == longest.text[-1]


def test_23_a_setting_drops_long_rows_instead(case):
    long = case(23)
    record, said = long.trained(DATASET="./train.jsonl", LONG_ROWS="drop")
    rows = record["train_rows"]
    assert (rows["used"], rows["cut"], sum(rows["left_out"].values())) == (7, 0, 1)
    assert "1 of 8" in said and names_row(said, 8)
    assert all(answer_in(row.learned[-1]).startswith("A ripe") for row in long.rows)


def test_24_packing_is_not_ignored(case):
    """There is none: a file of settings that asks for it is refused."""
    packed = case(24)
    result = packed.run("train", "--env-file", packed.env_file("run.env"), ALLOW_CPU="true")
    assert result.status == 2 and "PACKING" in result.err
