"""A chat as text, with the stretch of it that each assistant turn is: what is learned, with the token that ends it."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from os.path import commonprefix

from jinja2 import TemplateError

from train.templates import ChatTemplate
from train.turns import Row, UnusableRow

Span = tuple[int, int]  # characters of the text, the end excluded
# Stands in for an answer: no template trims it or reads it.
MARK = "\ue000\ue001\ue002"


class NotRendered(Exception):
    """The template silently leaves out something that rows bring; the run would train on less than the data says."""


def lay_out(template: ChatTemplate, row: Row, changes: Counter[str]) -> tuple[str, list[Span]]:
    """The text of a row of `messages` (and `tools`) up to its last answer, and the spans that are learned.

    A system turn that the template refuses goes into the first user turn, and turns of one role in a row become one
    where it insists on their taking turns; `changes` counts both.

    Raises:
        UnusableRow: the template refuses the chat, or leaves a turn out.
        NotRendered: the template knows no tools or no tool calls, and the row has some.
    """
    last = max(index for index, message in enumerate(row["messages"]) if message["role"] == "assistant")
    messages, tools = row["messages"][: last + 1], row.get("tools")
    if tools and not template.takes_tools:
        raise NotRendered("rows bring tools, the chat template does not render them")
    if any("tool_calls" in message for message in messages) and not template.takes_calls:
        raise NotRendered("rows use tool_calls, the chat template does not render them")
    if messages[0]["role"] == "system" and not template.takes_system:
        messages = _system_folded(messages)
        changes["the system turn is put before the first user turn's text: the chat template takes no system turn"] += 1
    try:
        rendered = _Rendered(template, messages, tools)
        return rendered.text, rendered.spans()
    except TemplateError as error:
        merged = _merged(messages)
        try:
            if len(merged) < len(messages):
                rendered = _Rendered(template, merged, tools)
                spans = rendered.spans()
                changes["turns of one role in a row become one: the chat template wants roles to take turns"] += 1
                return rendered.text, spans
        except TemplateError:
            pass  # the first refusal says why
        raise UnusableRow(f"the chat template refuses it ({str(error)[:120]})") from error


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


@dataclass
class _Rendered:
    """A chat in its template, and where each of its answers stands."""

    template: ChatTemplate
    messages: list[Row]
    tools: list[Row] | None

    def __post_init__(self) -> None:
        self.text = self._up_to(len(self.messages))

    def spans(self) -> list[Span]:
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                _must_show(message, self.text)
            elif message.get("learned", True):
                start, end = self._span(index)
                if end <= start or (spans and start < spans[-1][1]):
                    raise UnusableRow("the chat template prints an answer differently in mid-chat")
                spans.append((start, end))
        return spans

    def _up_to(self, index: int, prompt: bool = False) -> str:
        return self.template.render(self.messages[:index], self.tools, prompt)

    def _span(self, index: int) -> Span:
        """The characters that the model is to say in an assistant turn, the token that ends the turn included."""
        message, text = self.messages[index], self.text
        content = message["content"].strip()
        start = _shared(self._up_to(index, prompt=True), text) if index else None
        if start is not None and "tool_calls" not in message:
            begins = _behind_blanks(text, start)
            if content and text.startswith(content, begins):
                return start, self._turn_end(index, begins + len(content))
        elif start is not None and index < len(self.messages) - 1:
            # A call ends where the chat would end with it; some templates put the tool's answer into the same turn.
            called = self._up_to(index + 1).rstrip()
            if text.startswith(called):
                return start, len(called)
        # A template that prints more than the content (thoughts, calls) or prints it elsewhere: put a mark in its place,
        # and see where the text begins and ceases to differ.
        others = [*self.messages[:index], {"role": "assistant", "content": MARK}, *self.messages[index + 1 :]]
        marked = self.template.render(others, self.tools)
        begins = _shared(marked, text)
        ends = len(text) - _shared(marked[::-1], text[::-1])
        if start is None or start > begins or start < text.rfind(self.messages[index - 1]["content"].strip()):
            start = begins
        return start, self._turn_end(index, ends)

    def _turn_end(self, index: int, said: int) -> int:
        """Where the turn ends whose content ends at `said`: behind its end token, else where the next turn begins."""
        last, mid = self.template.last, self.template.mid
        at_the_end = index == len(self.messages) - 1
        for end in [last, mid] if at_the_end else [mid, last]:
            if end and self.text.endswith(end, 0, said):
                return said
            if end and self.text.startswith(end, _behind_blanks(self.text, said)):
                return _behind_blanks(self.text, said) + len(end)
        if at_the_end:
            return len(self.text.rstrip())
        return max(said, _shared(self._up_to(index + 1), self.text))


def _must_show(message: Row, text: str) -> None:
    said = message["content"].strip()
    if (
        said not in text
        and json.dumps(said)[1:-1] not in text
        and json.dumps(said, ensure_ascii=False)[1:-1] not in text
    ):
        raise UnusableRow(f"the chat template leaves a {message['role']} turn out or changes it")


def _behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    return len(one) if other.startswith(one) else len(commonprefix([one, other]))
