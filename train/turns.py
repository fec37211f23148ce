"""Chat turns of every common spelling to the roles and keys that chat templates know."""

import json
import math
from collections import Counter
from typing import Any

Row = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "question", "instruction", "input"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "model", "bot", "chatbot", "chatgpt", "ai", "claude", "bard", "bing", "answer", "output"),
        "assistant",
    ),
    **dict.fromkeys(("response", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response", "ipython"), "tool"),
}
CALLS = ("function_call", "tool_call")  # roles whose content is the call itself
# Keys of a turn that templates read as they are.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
KEPT = ("name", "tool_call_id", *THOUGHTS)
WEIGHTS = ("weight", "loss_weight", "train")  # a turn with 0 or false is read and not learned


class UnusableRow(Exception):
    """A row that cannot be trained on; its text is the reason, counted and reported by whoever reads rows."""


def as_text(value: Any, reason: str, changes: Counter[str]) -> str:
    """A cell as text: numbers and truth values as JSON writes them, which `changes` counts.

    Raises:
        UnusableRow: the cell is missing or blank (`reason`), nested, a date, or no valid Unicode.
    """
    if is_missing(value):
        raise UnusableRow(reason)
    if isinstance(value, bool | int | float):
        changes["a number or truth value is taken as text, as JSON writes it"] += 1
        return json.dumps(value)
    if not isinstance(value, str):
        raise UnusableRow(f"a {type(value).__name__} where text belongs")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow("text with half a Unicode character (a lone surrogate)") from error
    return value


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, a blank text, an empty list, or the NaN that pandas writes for it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def normalise(turns: Any, changes: Counter[str]) -> list[Row]:
    """Turns with `role`, `content` and, where they have them, `tool_calls`; typed parts joined, empty systems left out.

    A turn that is not to be learned has `learned` False.

    Raises:
        UnusableRow: no turns, an unknown role, or an empty turn.
    """
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("no turns")
    return [message for turn in turns if (message := _turn(turn, changes))]


def need_an_answer(messages: list[Row]) -> None:
    """Refuse turns of which none is learned.

    Raises:
        UnusableRow: no assistant turn, or none with a weight above 0.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise UnusableRow("no assistant turn")
    if not any(message.get("learned", True) for message in answers):
        raise UnusableRow("no assistant turn with a weight above 0")


def _turn(turn: Any, changes: Counter[str]) -> Row | None:
    if not isinstance(turn, dict):
        raise UnusableRow("a turn without role and content")
    spoken = turn.get("role", turn.get("from", turn.get("speaker")))
    role = ROLES.get(str(spoken).strip().lower())
    if role is None:
        raise UnusableRow(f'a turn of the role "{str(spoken)[:40]}"')
    content = turn.get("content", turn.get("value", turn.get("text")))
    message: Row = {"role": role, "content": ""} | {key: turn[key] for key in KEPT if turn.get(key) is not None}
    if str(spoken).strip().lower() in CALLS:
        message["tool_calls"] = _calls(content)
    else:
        if called := turn.get("tool_calls") or turn.get("function_call"):
            message["tool_calls"] = _calls(called)
        content = _joined(content)
        blank = is_missing(content)
        if blank and role == "system":
            return None
        if not blank or (role != "tool" and "tool_calls" not in message):
            message["content"] = as_text(content, f"empty {role} turn", changes)
    for key in WEIGHTS:
        if (weight := turn.get(key)) is not None:
            if weight not in (0, 1):
                raise UnusableRow(f"a turn of {key} {str(weight)[:20]}: only 0 and 1 are known")
            message["learned"] = bool(weight)
    return message


def _joined(content: Any) -> Any:
    """Typed parts as one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part if isinstance(part, str) else isinstance(part, dict) and part.get("text", part.get("value"))
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableRow(f'a part of type "{str(kind)[:40]}", which is no text')
        texts.append(text)
    return "".join(texts)


def _calls(called: Any) -> list[Row]:
    """Tool calls as `{"type": "function", "function": {"name", "arguments"}}`; arguments written as JSON are read."""
    calls = _from_json(called)
    calls = calls if isinstance(calls, list) else [calls]
    found = []
    for call in calls:
        function = _function(call, "a tool call without a name")
        arguments = _from_json(function.get("arguments", function.get("parameters", {})))
        if not isinstance(arguments, dict):
            raise UnusableRow("a tool call whose arguments are no JSON object")
        known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        found.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | known)
    return found


def tools(described: Any) -> list[Row]:
    """The tools of a row, from a list or its JSON, each as `{"type": "function", "function": …}`.

    Raises:
        UnusableRow: they are no list of objects with a name.
    """
    listed = _from_json(described)
    if not isinstance(listed, list):
        raise UnusableRow("tools that are no list")
    return [{"type": "function", "function": _function(tool, "a tool without a name")} for tool in listed]


def _function(item: Any, reason: str) -> Row:
    """What a tool or a call is, with its wrapping or without."""
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(reason)
    return function


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableRow("a tool call or tool that is no JSON") from error
