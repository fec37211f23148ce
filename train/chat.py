"""A chat as text, with the stretches of it that are learned: made fit for its template first, and every change counted."""

from collections import Counter
from itertools import groupby

from jinja2 import TemplateError

from train.spans import Rendered, Span
from train.templates import ChatTemplate
from train.turns import Row, UnusableRow


class NotRendered(Exception):
    """The template silently leaves out something that rows bring; the run would train on less than the data says."""


def lay_out(
    template: ChatTemplate, row: Row, changes: Counter[str], completion_only: bool = True
) -> tuple[str, list[Span]]:
    """The text of a row of `messages` (and `tools`), and the spans that are learned.

    What follows the last learned answer is left out where answers alone are learned. A system turn that the template
    refuses goes into the first user turn, and turns of one role in a row become one where it insists on their taking
    turns. `changes` counts all of these.

    Raises:
        UnusableRow: the template refuses the chat, or leaves a turn out.
        NotRendered: the template knows no tools or no tool calls, and the row has some.
    """
    messages, tools = row["messages"], row.get("tools")
    if completion_only:
        learned = (at for at, m in enumerate(messages) if m["role"] == "assistant" and m.get("learned", True))
        behind = max(learned) + 1
        if behind < len(messages):
            changes["what follows the last learned answer is left out"] += 1
        messages = messages[:behind]
    if tools and not template.takes_tools:
        raise NotRendered("rows bring tools, the chat template does not render them")
    if any("tool_calls" in message for message in messages) and not template.takes_calls:
        raise NotRendered("rows use tool_calls, the chat template does not render them")
    messages = [_without_end(message, template, changes) for message in messages]
    if any(template.has_special(message["content"]) for message in messages):
        changes["a turn holds a control token of the model, which is read as one"] += 1
    if messages[0]["role"] == "system" and not template.takes_system:
        messages = _system_folded(messages)
        changes["the system turn is put before the first user turn's text: the chat template takes no system turn"] += 1
    try:
        rendered = Rendered(template, messages, tools)
    except TemplateError as error:
        merged = _merged(messages)
        if len(merged) == len(messages):
            raise _refused(error) from error
        try:
            rendered = Rendered(template, merged, tools)
        except TemplateError:
            raise _refused(error) from error
        changes["turns of one role in a row become one: the chat template wants roles to take turns"] += 1
    try:
        return rendered.text, rendered.spans(changes)
    except TemplateError as error:
        raise _refused(error) from error


def _refused(error: TemplateError) -> UnusableRow:
    return UnusableRow(f"the chat template refuses it ({str(error)[:120]})")


def _without_end(message: Row, template: ChatTemplate, changes: Counter[str]) -> Row:
    """An answer without the end token that an export has left in its text: the template prints its own."""
    said = message["content"].rstrip()
    end = next((end for end in (template.last, template.tokenizer.eos_token) if end and said.endswith(end)), None)
    if message["role"] != "assistant" or not end or said == end:
        return message
    changes["an answer's text ends in the end token, of which one is left"] += 1
    return message | {"content": said.removesuffix(end)}


def _system_folded(messages: list[Row]) -> list[Row]:
    system, *rest = messages
    at = next((index for index, message in enumerate(rest) if message["role"] == "user"), None)
    if at is None:
        raise UnusableRow("a system turn without a user turn, which the chat template does not take")
    return [*rest[:at], rest[at] | {"content": f"{system['content']}\n\n{rest[at]['content']}"}, *rest[at + 1 :]]


def _merged(messages: list[Row]) -> list[Row]:
    """Turns of one role in a row as one; those with tool calls, or that differ in being learned, stay as they are."""
    merged = []
    for (role, called, learned), some in groupby(
        messages, key=lambda m: (m["role"], "tool_calls" in m, m.get("learned", True))
    ):
        same = list(some)
        if role == "tool" or called:
            merged += same
            continue
        merged.append(same[0] | {"content": "\n\n".join(message["content"] for message in same), "learned": learned})
    return merged
