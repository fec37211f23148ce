"""What the model reads and learns: answers only, one BOS, and an end token that is always a target."""

from collections import Counter

import pytest
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tests.conftest import build_tokenizer
from train import templates, tokens
from train.account import Account
from train.sources import Place

CHAT = {
    "messages": [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "A plum."},
        {"role": "user", "content": "Name a tree."},
        {"role": "assistant", "content": "An oak."},
    ]
}
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}(thinks){% endif %}{{ m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"


def encode(row, tokenizer, completion_only=True):
    template = templates.ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    piece = tokens.lay_out_row(row, template, Counter(), completion_only)
    ((ids, labels),) = tokens.encode([piece], template, completion_only)
    assert len(ids) == len(labels)
    assert all(label in (tokens.IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return ids, labels


def learned(labels, tokenizer) -> str:
    return tokenizer.decode([label for label in labels if label != tokens.IGNORED])


def adding_bos(tokenizer):
    """The tokenizer, now putting a BOS before all it encodes, as Llama's does."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_every_assistant_turn_is_learned_with_its_end_token_and_nothing_else():
    tokenizer = build_tokenizer()
    ids, labels = encode(CHAT, tokenizer)
    assert learned(labels, tokenizer) == "A plum.<|end|>An oak.<|end|>"
    assert tokenizer.decode(ids).startswith("<|start|>user\nName a fruit.<|end|>\n<|start|>assistant\nA plum.")


def test_a_turn_of_weight_0_is_read_and_not_learned():
    tokenizer = build_tokenizer()
    first = [CHAT["messages"][0], CHAT["messages"][1] | {"learned": False}]
    ids, labels = encode({"messages": first + CHAT["messages"][2:]}, tokenizer)
    assert learned(labels, tokenizer) == "An oak.<|end|>"
    assert "A plum.<|end|>" in tokenizer.decode(ids)


def test_everything_is_learned_by_choice():
    tokenizer = build_tokenizer()
    asked_last = {"messages": CHAT["messages"][:3]}
    assert tokenizer.decode(encode(asked_last, tokenizer, completion_only=False)[1]).count("Name a tree.") == 1
    ids, labels = encode(CHAT, tokenizer, completion_only=False)
    assert labels == ids


@pytest.mark.parametrize("pad", [{}, {"pad_token": "<|end|>"}, {"pad_token": "<|eos|>"}])
@pytest.mark.parametrize(
    "row",
    [CHAT, {"prompt": "Name a fruit:\n", "completion": "A plum."}, {"text": "A plum."}, {"text": "A plum.<|end|>"}],
)
def test_a_row_ends_with_a_learned_stop_token_once(row, pad):
    tokenizer = build_tokenizer(**pad)
    ids, labels = encode(row, tokenizer)
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id
    assert ids[-2] != tokenizer.eos_token_id


def test_a_turn_that_ends_with_another_token_than_eos_stops_there():
    tokenizer = build_tokenizer(eos_token="<|eos|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids, _ = encode(CHAT, tokenizer)
    assert ids[-1] == end
    assert templates.ChatTemplate(tokenizer, {tokenizer.eos_token_id}).stop_ids == {end, tokenizer.eos_token_id}


@pytest.mark.parametrize("prompt", ["", "Name a fruit:\n"])
def test_a_stop_token_inside_a_text_cuts_nothing_off(prompt):
    tokenizer = build_tokenizer()
    said = "A plum.<|end|>An oak."
    row = {"prompt": prompt, "completion": said} if prompt else {"text": said}
    ids, labels = encode(row, tokenizer)
    assert learned(labels, tokenizer) == said + "<|end|>"
    assert tokenizer.decode(ids) == prompt + said + "<|end|>"


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("An o", "ak."),
        ("Name a fr", "uit."),
        ("Name: ", "é plum"),
        ("Is it 日", "本?"),
        ("A ", " plum"),
        ("A plum", "."),
        ("x\n", "\n\ny"),
    ],
)
def test_a_prompt_is_read_as_it_is_read_alone_and_the_completion_is_learned_whole(prompt, completion):
    """Also where a token of the text as a whole would span the border."""
    tokenizer = build_tokenizer()
    ids, labels = encode({"prompt": prompt, "completion": completion}, tokenizer)
    alone = tokenizer(prompt)["input_ids"]
    assert ids[: len(alone)] == alone
    assert labels[: len(alone)] == [tokens.IGNORED] * len(alone)
    assert learned(labels, tokenizer) == completion + "<|end|>"


def test_a_tokenizer_that_ends_all_it_encodes_puts_no_end_between_prompt_and_completion():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    for prompt, completion in ((" a a a", " yes"), ("An o", "ak.")):
        ids, labels = encode({"prompt": prompt, "completion": completion}, tokenizer)
        assert tokenizer.decode(ids) == prompt + completion + "<|end|>"
        assert learned(labels, tokenizer) == completion + "<|end|>"


def test_a_tokenizer_that_puts_a_blank_first_changes_no_text():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    ids, labels = encode({"prompt": "An o", "completion": "ak."}, tokenizer)
    assert tokenizer.decode(ids) == " An oak.<|end|>"
    assert "ak.<|end|>" in learned(labels, tokenizer)


def test_a_template_that_thinks_only_in_the_last_turn_learns_every_answer():
    """Qwen3's prints an empty thought before the last answer and none before earlier ones."""
    tokenizer = build_tokenizer(THINKING_TEMPLATE)
    _, labels = encode(CHAT, tokenizer)
    assert learned(labels, tokenizer) == "A plum.<|end|>(thinks)An oak.<|end|>"


def test_a_question_after_the_last_answer_is_left_out():
    tokenizer = build_tokenizer()
    ids, labels = encode({"messages": CHAT["messages"][:3]}, tokenizer)
    assert learned(labels, tokenizer) == "A plum.<|end|>"
    assert tokenizer.decode(ids).endswith("A plum.<|end|>")


@pytest.mark.parametrize(
    "row", [CHAT, {"prompt": "<|bos|>Name: ", "completion": "A plum."}, {"text": "<|bos|>A plum."}, {"text": "A plum."}]
)
def test_a_row_never_starts_with_two_bos(row):
    tokenizer = adding_bos(build_tokenizer(BOS_TEMPLATE))
    ids, _ = encode(row, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("with_bos", [False, True])
def test_chatml_for_a_base_model_adds_no_token(with_bos):
    tokenizer = build_tokenizer(None)
    if with_bos:
        adding_bos(tokenizer)
    size = len(tokenizer)
    templates.choose(tokenizer, "plum", [tokenizer.eos_token_id])
    ids, labels = encode(CHAT, tokenizer)
    assert len(tokenizer) == size
    assert ids.count(tokenizer.bos_token_id) == with_bos
    assert "<|im_start|>user\nName a fruit.<|end|>\n<|im_start|>assistant\nA plum.<|end|>" in tokenizer.decode(ids)
    assert learned(labels, tokenizer) == "A plum.<|end|>An oak.<|end|>"


def tokenise(*texts, max_length=64, drop_long=False):
    tokenizer = build_tokenizer()
    template = templates.ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    asked = [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
             for question, answer in texts]  # fmt: skip
    rows = [(Place("rows.jsonl", number), row) for number, row in enumerate(asked, start=1)]
    account = Account("train", read=len(rows))
    done = list(tokens.tokenise(iter(rows), template, max_length, True, drop_long, account))
    return done, account, tokenizer


def test_rows_are_accounted_for_and_a_cut_row_gets_no_false_end(capsys):
    short, long, late = ("Name a fruit.", "A plum."), ("Name a fruit.", "A plum. " * 40), ("Name it. " * 40, "A plum.")
    done, account, tokenizer = tokenise(short, long, late)
    account.report(64)
    assert (account.used, account.cut, account.dropped.total()) == (2, 1, 1)
    assert [len(row["input_ids"]) for row in done][1] == 64
    assert [row["input_ids"][-1] == tokenizer.eos_token_id for row in done] == [True, False]
    assert account.tokens == sum(len(row["input_ids"]) for row in done)
    assert account.tokens_lost == done[1]["length"] - 64
    assert account.supervised == sum(label != tokens.IGNORED for row in done for label in row["labels"])
    assert account.percentiles()["p50"] == done[0]["length"] and account.percentiles()["p100"] == done[1]["length"]
    said = capsys.readouterr().err
    assert "dropped 1 of 3" in said and "row 3 of rows.jsonl" in said and "MAX_LENGTH=64: 1 of 2" in said
    assert "<|start|>user\nName a fruit.<|end|>\n<|start|>assistant\n⟦A plum.<|end|>⟧" in said


def test_long_rows_are_left_out_by_choice():
    done, account, _ = tokenise(("Name a fruit.", "A plum."), ("Name a fruit.", "A plum. " * 40), drop_long=True)
    assert len(done) == account.used == account.left_out.total() == 1
    assert not account.dropped and not account.cut
