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


def turns(*said):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]


def test_all_of_an_answer_is_learned_though_its_question_comes_up_again():
    """What a template puts before an answer is told from the question, wherever else that stands."""
    template = template_of(tokenizer_for("qwen3"))
    for question in ("Paris", "Name it.", "think"):
        assert learned(template, turns(question, "Paris is a city."))[0] == [
            "<think>\n\n</think>\n\nParis is a city.<|im_end|>"
        ]
    stretches, _ = learned(template_of(tokenizer_for("gptoss")), turns("hi", "one", "this", "two"))
    assert stretches[0] == "<|channel|>final<|message|>one<|end|>"
    stretches, _ = learned(template_of(tokenizer_for("gptoss")), turns("final", "hm"))
    assert stretches == ["<|channel|>final<|message|>hm<|return|>"]


@pytest.mark.parametrize(
    ("name", "answer", "left_out"),
    [
        ("deepseek_r1_distill", {"content": "<think>again</think>\n\n4"}, "<think>"),
        ("llama3", {"content": "4", "reasoning_content": "again"}, "reasoning_content"),
        ("qwen3", {"content": "4", "reasoning_content": "again"}, None),
        ("gptoss", {"content": "4", "thinking": "again"}, None),
    ],
)
def test_thoughts_are_learned_or_their_loss_is_counted(name, answer, left_out):
    changes = Counter()
    stretches, _ = learned(
        template_of(tokenizer_for(name)), [*turns("2+2?"), {"role": "assistant"} | answer], changes=changes
    )
    assert "4" in stretches[0] and ("again" in stretches[0]) is (left_out is None)
    assert left_out in str(changes) if left_out else not changes


@pytest.mark.parametrize(
    ("name", "turn", "reason"),
    [
        ("llama3_1", {"content": "Let me look.", "tool_calls": [CALL]}, "leaves out an answer or a part of it"),
        ("gptoss", {"content": "", "tool_calls": [CALL, CALL]}, "leaves out a tool call"),
    ],
)
def test_what_a_template_leaves_out_of_an_answer_is_the_reason_to_drop_it(name, turn, reason):
    called = [CALLED[0], {"role": "assistant"} | turn, *CALLED[2:]]
    with pytest.raises(UnusableRow, match=reason):
        learned(template_of(tokenizer_for(name)), called)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5", "gptoss", "qwen3", "qwen2_5", "lfm2_2_5", "glm4moe"])
def test_a_tools_answer_is_never_learned(name):
    template = template_of(tokenizer_for(name))
    said, thought = {"content": "Let me look."}, {"reasoning_content": "Look it up."}
    for beside in (said, thought, said | thought, {"thinking": "Look it up."}):
        row = [CALLED[0], CALLED[1] | beside, CALLED[2] | {"content": "sunny"}, CALLED[3]]
        try:
            stretches, _ = learned(template, row)
        except UnusableRow:
            continue  # dropped and counted
        assert "sunny" not in "".join(stretches) and "quince" in stretches[0]
    stretches, _ = learned(
        template, [*CALLED[:2], CALLED[2] | {"content": "It"}, {"role": "assistant", "content": "It is."}]
    )
    assert stretches[1].count("It") == 1


def test_thoughts_before_a_call_lose_no_row():
    stretches, _ = learned(
        template_of(tokenizer_for("gptoss")), [CALLED[0], CALLED[1] | {"thinking": "x"}, *CALLED[2:]]
    )
    assert stretches[0].endswith("<|call|>") and "quince" in stretches[0]


def test_arguments_are_json_text_where_a_template_wants_them_so():
    template = template_of(tokenizer_for("deepseekv3"))
    assert template.takes_calls
    stretches, _ = learned(template, CALLED)
    assert '"quince"' in stretches[0]


def test_a_tool_turn_that_is_not_printed_is_named_though_its_text_stands_elsewhere():
    asked = [*turns("What is 2+2?"), {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    with pytest.raises(UnusableRow, match="leaves a tool turn out"):
        learned(template_of(tokenizer_for("phi3")), asked)


def test_control_tokens_in_a_turn_are_counted_and_an_end_token_is_not_doubled():
    changes = Counter()
    template = template_of(build_tokenizer())
    stretches, text = learned(template, turns("Hi", "Ho<|end|>", "x<|start|>", "y"), changes=changes)
    assert "<|end|><|end|>" not in text
    assert stretches == ["Ho<|end|>", "y<|end|>"]
    assert changes == {
        "an answer's text ends in the end token, of which one is left": 1,
        "a turn holds a control token of the model, which is read as one": 1,
    }


def test_tokens_that_are_plain_text_are_no_control_tokens():
    """Some tokenizers add runs of blanks, and thoughts' marks, to the vocabulary as ordinary words."""
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] }}{% endfor %}"
    )
    tokenizer.add_tokens(["\n\n", "<think>"])
    template = template_of(tokenizer)
    assert (template.last, template.mid) == (None, None)
    changes = Counter()
    learned(template, turns("Hi", "<think>Ho", "a\n\nb", "c"), changes=changes)
    assert not changes


def test_a_long_chat_is_rendered_a_few_times_a_turn_at_most():
    template = template_of(tokenizer_for("qwen3_5_think"))
    long = [turn | ({"content": turn["content"] or "x" * 2000}) for _ in range(10) for turn in CALLED]
    rendered, render = [], template.render
    template.render = lambda *given, **rest: (rendered.append(1), render(*given, **rest))[1]
    stretches, _ = learned(template, long)
    assert len(stretches) == 20 and len(rendered) <= 4 * len(long)


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
