"""Rows of any known shape to `messages`, `prompt`/`completion` or `text`; nothing about models.

A shape is known by the columns of each row:

    messages, conversations … (ShareGPT)    chat turns, one of them an answer; with optional tools
    prompt + completion                     TRL's pair, as text (used verbatim) or as chat turns
    instruction/question/… + output/…       one question and one answer, with optional context, system and history
    text                                    plain text

PROMPT_COLUMN, COMPLETION_COLUMN and PROMPT_TEMPLATE name what no rule knows.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from train import turns
from train.config import Config
from train.turns import Row, UnusableRow, as_text

CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
QUESTIONS = ("instruction", "question", "query", "prompt", "problem", "user", "human", "input")
ANSWERS = ("output", "response", "answer", "completion", "solution", "assistant", "reply", "target")
CONTEXTS = ("input", "context")
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
SHAPES = "messages; or prompt and completion; or instruction and output (with input); or text"


class UnknownShape(UnusableRow):
    """A row whose columns no rule knows."""


@dataclass(frozen=True)
class Columns:
    """The columns of a row that training uses, by what they are for."""

    chat: str | None = None
    prompt: str | None = None  # of a pair of prompt and completion
    question: str | None = None
    answer: str | None = None
    context: str | None = None
    system: str | None = None
    history: str | None = None
    tools: str | None = None
    text: str | None = None

    def __str__(self) -> str:
        named = {key: name for key, name in vars(self).items() if name}
        return ", ".join(name if key == name else f"{name} as {key}" for key, name in named.items())


@dataclass
class Shaper:
    """Brings rows to a known form, as the settings say.

    `changes` counts what was altered in the last row, `shapes` the columns that rows were known by.
    """

    config: Config
    shapes: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)

    def __call__(self, row: Any) -> Row:
        """`messages` (with `tools` where there are some), `prompt` and `completion`, or `text`.

        Raises:
            UnknownShape: no rule knows the columns.
            UnusableRow: the row cannot be trained on.
        """
        self.changes.clear()
        if not isinstance(row, dict):
            raise UnknownShape(f"a row that is a {type(row).__name__}, not an object with columns")
        columns = columns_of(tuple(map(str, row)), self.config.prompt_column, self.config.completion_column,
                             bool(self.config.prompt_template))  # fmt: skip
        try:
            shaped = self._shaped(row, columns)
        except RecursionError as error:
            raise UnusableRow("nested too deeply") from error
        self.shapes[str(columns)] += 1
        return shaped

    def _shaped(self, row: Row, columns: Columns) -> Row:
        if columns.text:
            return {"text": as_text(row[columns.text], "empty text", self.changes)}
        if columns.prompt and columns.answer:
            prompt, completion = row[columns.prompt], row[columns.answer]
            if not isinstance(prompt, list) and not isinstance(completion, list):
                return {
                    "prompt": as_text(prompt, "empty prompt", self.changes),
                    "completion": as_text(completion, "empty answer", self.changes),
                }
            prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            completion = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
            asked = turns.normalise(prompt, self.changes) if prompt else []
            messages = [message | {"learned": False} for message in asked] + turns.normalise(completion, self.changes)
        elif columns.chat:
            messages = turns.normalise(_list(row[columns.chat]), self.changes)
        else:
            messages = turns.normalise(self._question(row, columns), self.changes)
        turns.need_an_answer(messages)
        if columns.system and messages[0]["role"] != "system" and _has(row[columns.system]):
            messages = [{"role": "system", "content": as_text(row[columns.system], "", self.changes)}, *messages]
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        shaped = {"messages": messages}
        if columns.tools and _has(row[columns.tools]) and (described := turns.tools(row[columns.tools])):
            shaped["tools"] = described
        return shaped

    def _question(self, row: Row, columns: Columns) -> list[Row]:
        """The turns of a row with one question and one answer."""
        if self.config.prompt_template:
            asked = filled(self.config.prompt_template, row, self.changes)
        else:
            asked = as_text(row[str(columns.question)], "empty question", self.changes)
        if columns.context and _has(row[columns.context]):
            asked += "\n\n" + as_text(row[columns.context], "", self.changes)
        answer = {"role": "assistant", "content": as_text(row[str(columns.answer)], "empty answer", self.changes)}
        return [*_pairs(row[columns.history] if columns.history else None), {"role": "user", "content": asked}, answer]


@lru_cache(maxsize=1024)  # by the columns of a row, which rarely differ
def columns_of(names: tuple[str, ...], prompt: str | None, completion: str | None, template: bool) -> Columns:
    """Which columns are used for what.

    Args:
        names: the columns of a row.
        prompt: PROMPT_COLUMN.
        completion: COMPLETION_COLUMN; alone, without PROMPT_COLUMN or a known question, it holds plain text.
        template: whether PROMPT_TEMPLATE makes the question.

    Raises:
        UnknownShape: no rule knows the columns, or a column that a setting names is not there.
    """
    for setting, wanted in (("PROMPT_COLUMN", prompt), ("COMPLETION_COLUMN", completion)):
        if wanted and wanted not in names:
            raise UnknownShape(f'no column "{wanted}", which {setting} names')
    by_name = {re.sub(r"[\s_-]+", "_", name.strip().lower()): name for name in reversed(names)}

    def first(known: Iterable[str], but: str | None = None) -> str | None:
        return next((by_name[name] for name in known if name in by_name and by_name[name] != but), None)

    mapped = prompt or completion or template
    if not mapped and (chat := first(CHATS)):
        return Columns(chat=chat, system=first(SYSTEMS), tools=first(TOOLS))
    if not mapped and "prompt" in by_name and "completion" in by_name:
        return Columns(prompt=by_name["prompt"], answer=by_name["completion"], tools=first(TOOLS))
    answer = completion or first(ANSWERS, but=prompt)
    question = prompt or (None if template else first(QUESTIONS, but=answer))
    if answer and (question or template):
        context = None if mapped else first(CONTEXTS, but=question)
        return Columns(
            question=question,
            answer=answer,
            context=context,
            system=first(SYSTEMS),
            history=first(("history",)),
            tools=first(TOOLS),
        )
    if completion or (not mapped and (text := first(("text",)))):
        return Columns(text=completion or text)
    raise UnknownShape(f"no known columns among {', '.join(names)}")


def filled(template: str, row: Row, changes: Counter[str]) -> str:
    """PROMPT_TEMPLATE with each {column} replaced; {{ and }} are braces, an empty cell leaves nothing.

    Raises:
        UnknownShape: the row has no such column.
        UnusableRow: every column that the template names is empty.
    """
    seen: list[str] = []

    def cell(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] not in row:
            raise UnknownShape(f'no column "{match[1]}", which PROMPT_TEMPLATE names')
        value = row[match[1]]
        seen.append(as_text(value, "", changes) if _has(value) else "")
        return seen[-1]

    asked = re.sub(r"\{\{|\}\}|\{([^{}]*)\}", cell, template)
    if seen and not any(seen):
        raise UnusableRow("empty question")
    return asked


def _has(value: Any) -> bool:
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def _list(value: Any) -> Any:
    """A list of turns that a table holds as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableRow("turns that are no JSON") from error


def _pairs(history: Any) -> list[Row]:
    """Earlier questions and answers as turns."""
    if not _has(history):
        return []
    history = _list(history)
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UnusableRow("a history that is no list of question and answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for pair in history for role, said in zip(roles, pair, strict=True)]
