"""How things are said: notes on standard error, results on standard output, errors with a fix and an exit code."""

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

notes = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
# A pipe has no width of its own; tables get this one.
results = Console(
    markup=False, highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120
)
MASK = "********"
SECONDS_BETWEEN_LINES = 30
T = TypeVar("T")
# What steers a terminal, turns its text around or cannot be written at all: names and rows can hold it.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_secrets: set[str] = set()


class Exit(IntEnum):
    """What the process's exit status means to whoever started it."""

    DONE = 0
    SETTINGS = 2
    MACHINE = 3
    MEMORY = 4
    NOT_PUSHED = 5
    DIVERGED = 6
    STOPPED = 75


class Refusal(Exception):
    """The run cannot go on: what happened, what to change, and the exit code that says which kind it is."""

    def __init__(self, what: str, fix: str, code: Exit = Exit.SETTINGS):
        super().__init__(f"{what}\n{fix}")
        self.what, self.fix, self.code = what, fix, code


def conceal(secret: str) -> None:
    """Never print this text again, wherever it turns up: libraries quote it in their errors."""
    _secrets.add(secret)


def masked(text: str) -> str:
    """The text with every secret in it masked, and as Python writes them the characters that cannot be printed."""
    for secret in _secrets:
        text = text.replace(secret, MASK)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def excerpt(text: str, longest: int = 80) -> str:
    """The start of a piece of data, on one line."""
    return shortened(" ".join(text[: longest + 1].split("\n")), longest)


def shortened(text: str, longest: int) -> str:
    """The text, or its start where it is longer."""
    return text if len(text) <= longest else text[:longest] + "…"


def say(text: str) -> None:
    """A line about what the program does or decided."""
    notes.print(masked(text))


def warn(text: str) -> None:
    """A line about something the user may want to change; the run goes on."""
    notes.print(masked(f"warning: {text}"), style="yellow")


def refuse(refusal: Refusal) -> None:
    """Print why the run ends and the way out."""
    notes.print(f"error: {masked(refusal.what)}", style="bold red")
    notes.print(f"fix: {masked(refusal.fix)}")


def result(text: str) -> None:
    """A line that the verb was asked for."""
    results.print(masked(text))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table as a result."""
    grid = Table(*headers, title=title and masked(title), title_justify="left", show_lines=False)
    for row in rows:
        grid.add_row(*map(masked, row))
    results.print(grid, soft_wrap=False)


def progress(items: Iterable[T], doing: str, total: int | None = None) -> Iterator[T]:
    """Hand the items on, with a bar where someone watches and a line every half minute where no one does."""
    if has_terminal():
        yield from track(items, doing, total=total, console=notes)
        return
    said = time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - said > SECONDS_BETWEEN_LINES:
            say(f"{doing}: {count:,}" + (f" of {total:,}" if total else ""))
            said = time.monotonic()
        yield item


def has_terminal() -> bool:
    """Whether someone watches: bars are drawn only then."""
    return sys.stderr.isatty()
