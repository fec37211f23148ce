"""How things are said: notes on standard error, results on standard output, errors with a fix and an exit code."""

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum

from rich.console import Console
from rich.table import Table

notes = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)
# A pipe has no width of its own; tables get this one.
results = Console(
    markup=False, highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120
)
MASK = "********"
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
    """The text with every secret in it masked."""
    for secret in _secrets:
        text = text.replace(secret, MASK)
    return text


def say(text: str) -> None:
    """A line about what the program does or decided."""
    notes.print(masked(text))


def warn(text: str) -> None:
    """A line about something the user may want to change; the run goes on."""
    notes.print(masked(f"warning: {text}"), style="yellow")


def refuse(refusal: Refusal) -> None:
    """Print why the run ends and the way out."""
    notes.print(masked(f"error: {refusal.what}"), style="bold red")
    notes.print(masked(f"fix: {refusal.fix}"))


def result(text: str) -> None:
    """A line that the verb was asked for."""
    results.print(masked(text))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Print a table as a result."""
    grid = Table(*headers, title=title, title_justify="left", show_lines=False)
    for row in rows:
        grid.add_row(*row)
    results.print(grid, soft_wrap=False)


def has_terminal() -> bool:
    """Whether someone watches: bars are drawn only then."""
    return sys.stderr.isatty()
