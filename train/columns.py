"""Which columns of a row are used for what: known by their names, whatever their case, or named by the settings."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from train.turns import UnusableRow

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
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = {key: name for key, name in vars(self).items() if name and key != "unused"}
        return ", ".join(name if key == name else f"{name} as {key}" for key, name in named.items())


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
    by_name = {_plain(name): name for name in reversed(names)}
    listed = f"the columns are {', '.join(names)}"
    for setting, wanted in (("PROMPT_COLUMN", prompt), ("COMPLETION_COLUMN", completion)):
        if wanted and _plain(wanted) not in by_name:
            raise UnknownShape(f'no column "{wanted}", which {setting} names; {listed}')
    prompt, completion = (by_name[_plain(name)] if name else None for name in (prompt, completion))

    def first(known: Iterable[str], *but: str | None) -> str | None:
        return next((by_name[name] for name in known if name in by_name and by_name[name] not in but), None)

    mapped = prompt or completion or template
    if not mapped and (why := _misleading(by_name)):
        raise UnknownShape(f"{why}; {listed}")
    found = None
    answer = completion or first(ANSWERS, prompt)
    question = prompt or (None if template else first(QUESTIONS, answer))
    if not mapped and (chat := first(CHATS)):
        found = Columns(chat=chat, system=first(SYSTEMS), tools=first(TOOLS))
    elif not mapped and "prompt" in by_name and "completion" in by_name:
        found = Columns(prompt=by_name["prompt"], answer=by_name["completion"], tools=first(TOOLS))
    elif answer and (question or template):
        found = Columns(
            question=question,
            answer=answer,
            context=None if template else first(CONTEXTS, question, answer),
            system=first(SYSTEMS),
            history=first(("history",)),
            tools=first(TOOLS),
        )
    elif completion or (not mapped and first(("text",))):
        found = Columns(text=completion or first(("text",)))
    if not found:
        lacks = (
            f"{question} may be the question, but no column is known to be the answer" if question else "no known shape"
        )
        raise UnknownShape(f"{lacks}; {listed}")
    used = {name for name in vars(found).values() if name}
    return replace(found, unused=tuple(name for name in names if name not in used) if not template else ())


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().lower())


def _misleading(by_name: dict[str, str]) -> str | None:
    """Why columns that look known are not to be trusted, so that nobody trains on half of them unawares."""
    if "chosen" in by_name and "rejected" in by_name:
        return "chosen and rejected are a preference set (COMPLETION_COLUMN=chosen learns the chosen ones)"
    if "text" in by_name and not {"role", "parent_id"}.isdisjoint(by_name):
        return "one turn a row, not one chat a row"
    if not {*CHATS}.isdisjoint(by_name):
        return None
    questions = [by_name[name] for name in QUESTIONS if name in by_name and name not in CONTEXTS]
    answers = [by_name[name] for name in ANSWERS if name in by_name]
    for what, setting, names in (("question", "PROMPT", questions), ("answer", "COMPLETION", answers)):
        if len(names) > 1 and questions and answers:
            return f"{' and '.join(names)} may each be the {what}: {setting}_COLUMN says which"
    return None
