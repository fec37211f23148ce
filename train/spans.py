"""Where each answer of a chat stands in the text that the template makes of it, and whether all of it is there."""

import json
from collections import Counter
from dataclasses import dataclass

from jinja2 import TemplateError

from train.templates import ChatTemplate
from train.turns import THOUGHTS, Row, UnusableRow

Span = tuple[int, int]  # characters of the text, the end excluded
# Stands in for an answer: no template trims it or reads it.
MARK = "\ue000\ue001\ue002"


@dataclass
class Rendered:
    """A chat in its template.

    Raises:
        jinja2.TemplateError: the template refuses it.
    """

    template: ChatTemplate
    messages: list[Row]
    tools: list[Row] | None

    def __post_init__(self) -> None:
        self.text = self._up_to(len(self.messages))

    def spans(self, changes: Counter[str]) -> list[Span]:
        """The stretch of each answer that is learned, with the token that ends it.

        Raises:
            UnusableRow: the template leaves out a turn or a part of an answer, or prints it where it is not to be told.
        """
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                self._must_show(message)
            elif message.get("learned", True):
                start, end = self._span(index)
                if end <= start or (spans and start < spans[-1][1]):
                    raise UnusableRow("the chat template prints an answer differently in mid-chat")
                _must_say(message, self.text[start:end], changes)
                spans.append((start, end))
        return spans

    def _up_to(self, index: int, prompt: bool = False) -> str:
        return self.template.render(self.messages[:index], self.tools, prompt)

    def _must_show(self, message: Row) -> None:
        missing = message["role"] == "tool" and not self.template.takes_results
        if missing or not _holds(self.text, message["content"].strip()):
            raise UnusableRow(f"the chat template leaves a {message['role']} turn out or changes it")

    def _span(self, index: int) -> Span:
        message, text = self.messages[index], self.text
        content, start = message["content"].strip(), self._start(index)
        if start is not None and "tool_calls" in message:
            # A call ends where the chat would end with it, though some templates print no thoughts in mid-chat; the
            # tool's answer may stand in the same turn.
            for turn in (message, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}):
                called = self.template.render([*self.messages[:index], turn], self.tools).rstrip()
                if text.startswith(called):
                    return start, len(called)
        elif start is not None and content:
            begins = _behind_blanks(text, start)
            if text.startswith(content, begins):
                return start, self._turn_end(index, begins + len(content))
        # The template prints more than the content, or elsewhere: put a mark in its place, and see where the text begins
        # and ceases to differ.
        others = [*self.messages[:index], {"role": "assistant", "content": MARK}, *self.messages[index + 1 :]]
        try:
            marked = self.template.render(others, self.tools)
        except TemplateError as error:
            raise UnusableRow("the chat template prints an answer so that its end cannot be told") from error
        begins = _shared(marked, text)
        ends = len(text) - _shared(marked[::-1], text[::-1])
        after = next((m["content"].strip() for m in self.messages[index + 1 : index + 2]), "")
        if "tool_calls" in message and after and after in text[begins:ends]:
            raise UnusableRow("the chat template prints a tool's answer into the turn of its call")
        return begins if start is None else min(start, begins), self._turn_end(index, ends)

    def _start(self, index: int) -> int | None:
        """Where the model is asked to answer; None where the prompt alone does not say."""
        if not index:
            return None
        prompt = self._up_to(index, prompt=True)
        start = _shared(prompt, self.text)
        # They may part at thoughts that only the prompt opens, and not before: some templates move earlier turns.
        before = self.messages[index - 1]["content"].strip()
        if start < len(prompt) and before and prompt.rfind(before) + len(before) > start:
            return None
        return start

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


def _must_say(message: Row, said: str, changes: Counter[str]) -> None:
    """All that a turn says is in what is learned of it; thoughts may be left out, which is counted."""
    content = message["content"].strip()
    if not _holds(said, content):
        thought, closed, rest = content.rpartition("</think>")
        if not closed or not _holds(said, rest.strip()):
            raise UnusableRow("the chat template leaves out an answer or a part of it")
        changes["the chat template leaves out the <think> part of an answer"] += 1
    for key in THOUGHTS:
        if isinstance(thought := message.get(key), str) and not _holds(said, thought.strip()):
            changes[f"the chat template leaves out an answer's {key}"] += 1
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    if any(said.count(name) < names.count(name) for name in names):
        raise UnusableRow("the chat template leaves out a tool call")


def _holds(text: str, said: str) -> bool:
    """Whether a text has in it what was said, as it is or as JSON writes it."""
    return said in text or any(json.dumps(said, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False))


def _behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _shared(one: str, other: str) -> int:
    """Characters that both begin with, found by halving: a loop over them is slow in long chats."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
