"""What the model reads and learns: answers only, one BOS, and an end token that is always a target."""

import datasets
import pytest

from tests.conftest import build_tokenizer
from train import data, tokens
from train.console import Refusal

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


def encode(row, tokenizer, stop_ids=None, completion_only=True):
    stop_ids = stop_ids or [tokenizer.eos_token_id]
    ids, labels = tokens.encode(row, tokenizer, stop_ids, completion_only)
    assert len(ids) == len(labels)
    return ids, labels


def learned(labels, tokenizer) -> str:
    return tokenizer.decode([label for label in labels if label != tokens.IGNORED])


def adding_bos(tokenizer):
    """The tokenizer, now putting a BOS before all it encodes, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_every_assistant_turn_is_learned_with_its_end_token_and_nothing_else():
    tokenizer = build_tokenizer()
    ids, labels = encode(CHAT, tokenizer)
    assert learned(labels, tokenizer) == "A plum.<|end|>An oak.<|end|>"
    assert tokenizer.decode(ids).startswith("<|start|>user\nName a fruit.<|end|>\n<|start|>assistant\nA plum.")


def test_everything_is_learned_by_choice():
    tokenizer = build_tokenizer()
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


def test_a_turn_that_ends_with_another_stop_token_than_eos_is_left_as_it_is():
    tokenizer = build_tokenizer(eos_token="<|eos|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids, _ = encode(CHAT, tokenizer, stop_ids=[end, tokenizer.eos_token_id])
    assert ids[-1] == end
    ids, _ = encode(CHAT, tokenizer, stop_ids=[tokenizer.eos_token_id])
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("prompt", ["", "Name a fruit:\n"])
def test_a_stop_token_inside_a_text_cuts_nothing_off(prompt):
    tokenizer = build_tokenizer()
    said = "A plum.<|end|>An oak."
    row = {"prompt": prompt, "completion": said} if prompt else {"text": said}
    ids, labels = encode(row, tokenizer)
    assert learned(labels, tokenizer) == said + "<|end|>"
    assert tokenizer.decode(ids) == prompt + said + "<|end|>"


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


def test_a_completion_is_learned_and_its_prompt_is_not():
    tokenizer = build_tokenizer()
    _, labels = encode({"prompt": "Name a fruit:\n", "completion": "A plum."}, tokenizer)
    assert learned(labels, tokenizer) == "A plum.<|end|>"


@pytest.mark.parametrize(
    "row", [CHAT, {"prompt": "<|bos|>Name: ", "completion": "A plum."}, {"text": "<|bos|>A plum."}, {"text": "A plum."}]
)
def test_a_row_never_starts_with_two_bos(row):
    tokenizer = adding_bos(build_tokenizer(BOS_TEMPLATE))
    ids, _ = encode(row, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("with_bos", [False, True])
def test_a_base_model_gets_a_template_that_adds_no_token(with_bos):
    tokenizer = build_tokenizer(None)
    if with_bos:
        adding_bos(tokenizer)
    size = len(tokenizer)
    assert tokens.set_default_template(tokenizer)
    assert not tokens.set_default_template(tokenizer)
    ids, labels = encode(CHAT, tokenizer)
    assert len(tokenizer) == size
    assert ids.count(tokenizer.bos_token_id) == with_bos
    assert "### Instruction:\nName a fruit.\n\n### Response:\nA plum.<|end|>" in tokenizer.decode(ids)
    assert learned(labels, tokenizer) == "A plum.<|end|>An oak.<|end|>"


def tokenise(questions, max_length=64):
    raw = datasets.Dataset.from_list(questions)
    _, shape = data.shaper(raw.column_names)
    tokenizer = build_tokenizer()
    return tokens.tokenise(raw, shape, tokenizer, [tokenizer.eos_token_id], max_length, True, "train"), tokenizer


def test_rows_are_accounted_for_and_a_cut_row_gets_no_false_end(capsys):
    done, tokenizer = tokenise(
        [
            {"instruction": "Name a fruit.", "output": "A plum."},
            {"instruction": "Name a fruit.", "output": "A plum. " * 40},
            {"instruction": "Name a fruit. " * 40, "output": "A plum."},
            {"instruction": "Name a fruit.", "output": ""},
        ]
    )
    account = done.account()
    assert (account["read"], account["used"], account["cut"]) == (4, 2, 1)
    assert account["dropped"] == {"answer begins after 64 tokens": 1, "empty answer": 1}
    assert [len(ids) for ids in done.rows["input_ids"]][1] == 64
    assert [ids[-1] == tokenizer.eos_token_id for ids in done.rows["input_ids"]] == [True, False]
    said = capsys.readouterr().err
    assert "dropped 2 of 4" in said and "1 are longer than MAX_LENGTH=64" in said


def test_a_thousand_unusable_rows_first_do_not_decide_the_columns():
    empty, good = {"instruction": "Name a fruit.", "output": ""}, {"instruction": "Name a fruit.", "output": "A plum."}
    done, _ = tokenise([empty] * 1001 + [good])
    assert len(done.rows) == 1


def test_no_usable_row_is_a_refusal_that_names_the_reasons():
    with pytest.raises(Refusal, match="none of the 2 train rows.*2 × answer begins after 64 tokens"):
        tokenise([{"instruction": "Name a fruit. " * 40, "output": "A plum."}] * 2)
