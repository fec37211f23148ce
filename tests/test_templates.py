"""Chat templates of every family that TRL carries: what is learned, where it stops, what is folded, merged or refused."""

import re
from collections import Counter
from pathlib import Path

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.conftest import build_tokenizer
from train import chat, templates
from train.turns import UnusableRow

FOLDER = Path(trl.__file__).parent / "chat_templates"
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
QUESTIONS, ANSWERS = ["Name a fruit.", "A tree?"], ["A plum.", "An oak, tall."]
CHAT = [{"role": role, "content": said} for pair in zip(QUESTIONS, ANSWERS, strict=True)
        for role, said in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"type": "function", "function": {"name": "pick", "arguments": {"fruit": "quince", "count": 3}}}
CALLED = [
    {"role": "user", "content": "Use pick."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "pick", "content": "done"},
    {"role": "assistant", "content": "Picked."},
]
MARKERS = r"<[|｜][^<>{}'\"\s+]*[|｜]>|<(?:start_of_turn|end_of_turn|end_of_utterance|turn\||\|turn)>|\[gMASK\]|<sop>"
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}{{ '[' + m['role'] + ']' + m['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def tokenizer_for(name):
    """A tokenizer of single bytes, and of the markers that the template's family has."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    bytes_only = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=bytes_only, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    markers = sorted(set(re.findall(MARKERS, source)))
    ends = [e for e in ("<|END_OF_TURN_TOKEN|>", "<|return|>", "<|user|>") if e in markers and "phi" not in name]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token=(ends or ["</s>"])[0], additional_special_tokens=markers
    )
    wrapped.chat_template = source
    return wrapped


def template_of(tokenizer, *stops):
    return templates.ChatTemplate(tokenizer, {tokenizer.eos_token_id, *stops})


def learned(template, messages, tools=None, changes=None):
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    text, spans = chat.lay_out(template, row, Counter() if changes is None else changes)
    return [text[start:end] for start, end in spans], text


def by_trl(name, messages):
    """What TRL's own training template of the family marks as the assistant's, in stretches."""
    tokenizer = tokenizer_for(f"{name}_training")
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    stretches, before = [], 0
    for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        if mask and not before:
            stretches.append([])
        if mask:
            stretches[-1].append(token)
        before = mask
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_learned_with_the_token_that_ends_it_and_no_question_is(name):
    template = template_of(tokenizer_for(name))
    stretches, _ = learned(template, CHAT)
    assert len(stretches) == 2
    for stretch, answer, end in zip(stretches, ANSWERS, (template.mid, template.last), strict=True):
        assert stretch.strip().endswith(answer + (end or "")), stretches
        assert not any(question in stretch for question in QUESTIONS)
    if name != "glm4moe":  # it ends a turn with the next one's opening, so the last with nothing
        last = re.findall(MARKERS + "|</s>", template.last)[-1]
        assert template.tokenizer.convert_tokens_to_ids(last) in template.stop_ids


@pytest.mark.parametrize("name", [name for name in FAMILIES if (FOLDER / f"{name}_training.jinja").exists()])
def test_trls_training_template_marks_the_same_answers(name):
    template = template_of(tokenizer_for(name))
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in CHAT]
    theirs = by_trl(name, parts if template.typed_parts else CHAT)
    ours, _ = learned(template, CHAT)
    assert len(theirs) == len(ours)
    # It may mark more: the turn's opening, an empty thought that it puts into every turn, blanks behind the end.
    extra = rf"(\s|{MARKERS}|</?think>|</s>|assistant)*"
    for mine, trls in zip(ours, theirs, strict=True):
        core = re.sub(r"^(\s|</?think>)+", "", mine)
        assert core in trls
        assert re.fullmatch(extra, trls.replace(core, "", 1)), (mine, trls)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_turn_is_printed_or_folded_and_said(name):
    changes = Counter()
    template = template_of(tokenizer_for(name))
    _, text = learned(template, [SYSTEM, *CHAT], changes=changes)
    assert "Be kind." in text
    assert bool(changes) is not template.takes_system


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_calls_are_printed_and_learned_or_refused(name):
    template = template_of(tokenizer_for(name))
    if not template.takes_calls:
        with pytest.raises(chat.NotRendered, match="tool_calls"):
            learned(template, CALLED)
        return
    stretches, _ = learned(template, CALLED)
    assert len(stretches) == 2
    assert "pick" in stretches[0] and "quince" in stretches[0] and "Use pick." not in stretches[0]
    assert "done" not in "".join(stretches)
    assert "Picked." in stretches[1] and "quince" not in stretches[1]


def test_tools_that_a_template_does_not_print_are_refused():
    tool = {"type": "function", "function": {"name": "pick", "description": "", "parameters": {}}}
    with pytest.raises(chat.NotRendered, match="tools"):
        learned(template_of(build_tokenizer()), CHAT, [tool])


def test_a_strict_template_gets_the_system_in_the_first_question_and_turns_of_one_role_as_one():
    changes = Counter()
    template = template_of(build_tokenizer(STRICT))
    _, text = learned(template, [SYSTEM, CHAT[0], *CHAT], changes=changes)
    assert "[user]Be kind.\n\nName a fruit.\n\nName a fruit.<|end|>[assistant]A plum.<|end|>" in text
    assert changes.total() == 2
    with pytest.raises(UnusableRow, match="roles must take turns"):
        learned(template, CHAT[1:])


def test_turns_that_a_template_leaves_out_are_named():
    only_two = "{% for m in messages if m['role'] != 'tool' %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    with pytest.raises(UnusableRow, match="leaves a tool turn out"):
        learned(template_of(build_tokenizer(only_two)), [*CHAT, {"role": "tool", "content": "sunny"}, CHAT[1]])


def test_a_chat_may_begin_with_an_answer():
    stretches, _ = learned(template_of(build_tokenizer()), CHAT[1:])
    assert stretches == ["A plum.<|end|>", "An oak, tall.<|end|>"]


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_a_template_that_prints_the_day_prints_the_same_one_every_day(name):
    _, text = learned(template_of(tokenizer_for(name)), CHAT)
    assert "26 Jul 2024" in text or "2024-07-26" in text


def test_a_model_without_template_gets_its_familys_where_it_stops_at_that_end_and_else_chatml():
    tokenizer = tokenizer_for("llama3")
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for stops, expected in (([end, tokenizer.eos_token_id], "<|eot_id|>"), ([tokenizer.eos_token_id], "</s>")):
        tokenizer.chat_template = None
        size = len(tokenizer)
        template, why = templates.choose(tokenizer, "llama", stops)
        assert template.last == expected and len(tokenizer) == size
        assert ("TRL's for llama" in why) is (expected == "<|eot_id|>")
    stretches, text = learned(template, CHAT)
    assert text.startswith("<|im_start|>user\nName a fruit.</s>\n<|im_start|>assistant\nA plum.</s>\n")
    assert stretches == ["A plum.</s>", "An oak, tall.</s>"]
