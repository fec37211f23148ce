"""Rows of every known shape to one form, and what is said about the rest."""

import pytest

from train import data
from train.columns import UnknownShape
from train.config import Config
from train.turns import UnusableRow

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
CALL = {"type": "function", "function": {"name": "pick", "arguments": {"fruit": "plum", "count": 3}}}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": {}}}


def shaped(row, **settings):
    shaper = data.Shaper(Config(_env_file=None, **settings))
    return shaper(row)


def chat(*contents, system=None):
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": first + [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]}


def spoken(*turns):
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ALPACA, chat("Add.\n\n1 and 2", "3")),
        *[(ALPACA | {"input": blank}, chat("Add.", "3")) for blank in ("", None, "  ", [], float("nan"))],
        ({"instruction": "Add.", "output": "None"}, chat("Add.", "None")),
        ({"instruction": "Add.", "context": None, "response": "3", "category": "sum"}, chat("Add.", "3")),
        (ALPACA | {"text": "Below is an instruction"}, chat("Add.\n\n1 and 2", "3")),
        (ALPACA | {"input": "", "history": [["Hi", "Hello"]]}, chat("Hi", "Hello", "Add.", "3")),
        ({"system_prompt": "Be kind.", "question": "Add.", "response": "3"}, chat("Add.", "3", system="Be kind.")),
        ({" Question ": "Add.", "ANSWER": "3"}, chat("Add.", "3")),
        ({"input": "Add.", "output": "3"}, chat("Add.", "3")),
        ({"problem": "Add.", "solution": "3"}, chat("Add.", "3")),
        ({"user": "Add.", "assistant": "3"}, chat("Add.", "3")),
        ({"prompt": "Add.", "response": "3"}, chat("Add.", "3")),
        ({"prompt": "Add: ", "completion": "3"}, {"prompt": "Add: ", "completion": "3"}),
        (chat("Hi", "Hello", "Bye", "See you"), chat("Hi", "Hello", "Bye", "See you")),
        ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]'}, chat("Hi", "Ho")),
        ({"TEXT": "A plum."}, {"text": "A plum."}),
        ({"instruction": "Add.", "output": 3}, chat("Add.", "3")),
        ({"instruction": "True?", "output": True}, chat("True?", "true")),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "value": "i"}]},
                          {"role": "assistant", "content": "Hello"}]},
            chat("Hi", "Hello"),
        ),
        (spoken(("system", ""), ("human", "Hi"), ("gpt", "Hello")), chat("Hi", "Hello")),
    ],
)  # fmt: skip
def test_known_shapes(row, expected):
    assert shaped(row) == expected


def test_a_pair_of_chats_learns_the_completion_only():
    row = {"prompt": chat("Hi", "Hello", "Add.")["messages"], "completion": [{"role": "assistant", "content": "3"}]}
    messages = shaped(row)["messages"]
    assert [m["content"] for m in messages if m["role"] == "assistant" and m.get("learned", True)] == ["3"]


@pytest.mark.parametrize("user", ["human", "user", "Human", "prompter"])
@pytest.mark.parametrize("assistant", ["gpt", "assistant", "model", "bot", "chatgpt"])
def test_every_common_role_becomes_the_templates(user, assistant):
    messages = shaped(spoken(("system", "Be kind."), (user, "Hi"), (assistant, "Hello")))["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("weight", ["weight", "loss_weight"])
def test_a_turn_of_weight_0_is_read_and_not_learned(weight):
    row = chat("Hi", "Hello", "Bye", "See you")
    row["messages"][1][weight], row["messages"][3][weight] = 0.0, 1.0
    assert [message.get("learned") for message in shaped(row)["messages"]] == [None, False, None, True]


@pytest.mark.parametrize(
    "called",
    [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "pick", "arguments": '{"fruit":"plum","count":3}'}}],
        },
        {"role": "assistant", "function_call": {"name": "pick", "arguments": '{"fruit": "plum", "count": 3}'}},
        {"from": "function_call", "value": '{"name": "pick", "arguments": {"fruit": "plum", "count": 3}}'},
    ],
)
def test_tool_calls_of_every_spelling_keep_their_arguments(called):
    row = {"messages": [{"role": "user", "content": "Pick."}, called, {"from": "observation", "value": "done"},
                        {"role": "assistant", "content": "Picked."}], "tools": [TOOL["function"]]}  # fmt: skip
    made = shaped(row)
    assert made["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert made["messages"][2] == {"role": "tool", "content": "done"}
    assert made["tools"] == [TOOL]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Add.", "output": " "}, "empty answer"),
        ({"instruction": None, "output": "3"}, "empty question"),
        ({"instruction": "Add.", "output": {"text": "3"}}, "a dict where text belongs"),
        ({"instruction": "Add.", "output": "\ud800"}, "lone surrogate"),
        ({"messages": []}, "no turns"),
        ({"messages": "plum"}, "no turns"),
        ({"messages": ["plum"]}, "a turn without role"),
        ({"messages": chat("Hi")["messages"]}, "no assistant turn"),
        (chat("Hi", None), "empty assistant turn"),
        (chat("Hi", [{"type": "image", "url": "x"}]), 'part of type "image"'),
        (spoken(("plum", "Hi"), ("gpt", "Hello")), 'role "plum"'),
        (spoken(("human", "Hi"), ("function_call", "pick plum")), "no JSON"),
        ({"messages": [{"role": "assistant", "content": "Hi", "weight": 0}]}, "weight above 0"),
        ({"messages": [{"role": "assistant", "content": "Hi", "weight": 0.5}]}, "only 0 and 1"),
        ({"text": None}, "empty text"),
        ({"text": ["a", "b"]}, "a turn without role"),
        ({"text": {"a": "b"}}, "a dict where text belongs"),
        (["a"], "a list, not an object"),
        ({"instruction": "Say hi", "output": float("nan")}, "empty answer"),
        ({"prompt": "Add.", "chosen": "3", "rejected": "4"}, "COMPLETION_COLUMN=chosen"),
        (chat("Hi", "Ho") | {"chosen": "3", "rejected": "4"}, "preference set"),
        ({"text": "Hi", "role": "prompter", "parent_id": None}, "one turn a row"),
        ({"problem": "Add.", "solution": "1 + 2 = 3", "answer": "3"}, "answer and solution may each be the answer"),
        ({"prompt": "Add.", "completion": "4", "label": False}, "its label rejects"),
        ({"row_id": 1, "Best Answer": "3"}, "no known shape; the columns are row_id, Best Answer"),
        ({"prompt": "Add."}, "prompt may be the question, but no column is known to be the answer"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row, reason):
    with pytest.raises(UnusableRow, match=reason):
        shaped(row)


def test_settings_name_what_no_rule_knows():
    row = {"Frage": "Plus?", "Best Answer": "3", "lang": "de", "note": None}
    assert shaped(row, PROMPT_COLUMN="Frage", COMPLETION_COLUMN="Best Answer") == chat("Plus?", "3")
    assert shaped(row, COMPLETION_COLUMN="frage") == {"text": "Plus?"}
    assert shaped(ALPACA | {"gold": "4"}, COMPLETION_COLUMN="gold") == chat("Add.\n\n1 and 2", "4")
    chosen = {"prompt": "Add.", "chosen": [{"role": "assistant", "content": "3"}], "rejected": []}
    assert shaped(chosen, COMPLETION_COLUMN="chosen") == {
        "messages": [{"role": "user", "content": "Add.", "learned": False}, {"role": "assistant", "content": "3"}]
    }
    template = {"PROMPT_TEMPLATE": r"{{{lang}}}{note}:\n{Frage}", "COMPLETION_COLUMN": "Best Answer"}
    assert shaped(row, **template) == chat("{de}:\nPlus?", "3")
    assert shaped(ALPACA, PROMPT_TEMPLATE="Q: {instruction}") == chat("Q: Add.", "3")
    with pytest.raises(UnusableRow, match="empty question"):
        shaped(row, PROMPT_TEMPLATE="Note: {note}", COMPLETION_COLUMN="Best Answer")
    for wrong in ({"PROMPT_COLUMN": "Fragen"}, {"PROMPT_TEMPLATE": "{Fragen}", "COMPLETION_COLUMN": "Best Answer"}):
        with pytest.raises(UnknownShape, match='no column "Fragen"'):
            shaped(row, **wrong)


def test_the_system_prompt_stands_where_a_chat_has_none():
    assert shaped(ALPACA, SYSTEM_PROMPT="Be kind.")["messages"][0] == {"role": "system", "content": "Be kind."}
    own = {"messages": chat("Hi", "Ho", system="Be short.")["messages"]}
    assert shaped(own, SYSTEM_PROMPT="Be kind.") == own
