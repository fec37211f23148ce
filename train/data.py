"""Rows of any known shape to `messages`, `prompt`/`completion` or `text`; nothing about models.

A shape is known by the columns of each row (columns.py):

    messages, conversations … (ShareGPT)    chat turns, one of them an answer; with optional tools
    prompt + completion                     TRL's pair, as text (used verbatim) or as chat turns
    instruction/question/… + output/…       one question and one answer, with optional context, system and history
    text                                    plain text

PROMPT_COLUMN, COMPLETION_COLUMN and PROMPT_TEMPLATE name what no rule knows.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from train import turns
from train.columns import Columns, UnknownShape, columns_of
from train.config import Config
from train.turns import Row, UnusableRow, as_text, is_missing


@dataclass
class Shaper:
    """Brings rows to a known form, as the settings say.

    `changes` counts what was altered in the last row, `shapes` the columns that rows were known by, `unused` the others.
    """

    config: Config
    shapes: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
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
        self.unused.update(columns.unused)
        return shaped

    def _shaped(self, row: Row, columns: Columns) -> Row:
        if columns.text and not isinstance(row[columns.text], list):
            return {"text": as_text(row[columns.text], "empty text", self.changes)}
        if columns.text:
            messages = turns.normalise(row[columns.text], self.changes)
        elif columns.prompt and columns.answer:
            if row.get("label") is False:
                raise UnusableRow("a completion that its label rejects")
            prompt, completion = _list(row[columns.prompt]), _list(row[columns.answer])
            if not isinstance(prompt, list) and not isinstance(completion, list):
                return {
                    "prompt": as_text(prompt, "empty prompt", self.changes),
                    "completion": as_text(completion, "empty answer", self.changes),
                }
            messages = self._pair(prompt, completion)
        elif columns.question and isinstance(row[str(columns.answer)], list):
            messages = self._pair(row[columns.question], row[str(columns.answer)])
        elif columns.chat:
            messages = turns.normalise(_list(row[columns.chat]), self.changes)
        else:
            messages = turns.normalise(self._question(row, columns), self.changes)
        turns.need_an_answer(messages)
        if columns.system and messages[0]["role"] != "system" and not is_missing(row[columns.system]):
            messages = [{"role": "system", "content": as_text(row[columns.system], "", self.changes)}, *messages]
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        shaped = {"messages": messages}
        if columns.tools and not is_missing(row[columns.tools]) and (described := turns.tools(row[columns.tools])):
            shaped["tools"] = described
        return shaped

    def _pair(self, prompt: Any, completion: Any) -> list[Row]:
        """The turns of a prompt and a completion of which one is a list of turns; the completion is learned."""
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        completion = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        asked = turns.normalise(prompt, self.changes) if prompt else []
        return [message | {"learned": False} for message in asked] + turns.normalise(completion, self.changes)

    def _question(self, row: Row, columns: Columns) -> list[Row]:
        """The turns of a row with one question and one answer."""
        if self.config.prompt_template:
            asked = filled(self.config.prompt_template, row, self.changes)
        else:
            asked = as_text(row[str(columns.question)], "empty question", self.changes)
        if columns.context and not is_missing(row[columns.context]):
            asked += "\n\n" + as_text(row[columns.context], "", self.changes)
        answer = {"role": "assistant", "content": as_text(row[str(columns.answer)], "empty answer", self.changes)}
        return [*_pairs(row[columns.history] if columns.history else None), {"role": "user", "content": asked}, answer]


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
            raise UnknownShape(f'no column "{match[1]}", which PROMPT_TEMPLATE names; the columns are {", ".join(row)}')
        value = row[match[1]]
        seen.append(as_text(value, "", changes) if not is_missing(value) else "")
        return seen[-1]

    asked = re.sub(r"\{\{|\}\}|\{([^{}]*)\}", cell, template)
    if seen and not any(seen):
        raise UnusableRow("empty question")
    return asked


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
    if is_missing(history):
        return []
    history = _list(history)
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise UnusableRow("a history that is no list of question and answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for pair in history for role, said in zip(roles, pair, strict=True)]
