"""What became of the rows: read, used, dropped and why, cut, lengths, learned tokens, and one row to look at."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.config import Config
from train.console import Refusal, excerpt, say, shortened, warn
from train.sources import Place

PERCENTILES = (50, 90, 95, 99, 100)
# This many dropped rows are seen at a glance: they end no run, unless MAX_DROPPED_FRACTION is given.
A_GLANCE = 10
SAMPLE_CHARACTERS = 2000
MOST_REASONS = 20


@dataclass
class Account:
    """Counts over the rows of one name, train or eval. Lengths are in tokens, of whole rows, before MAX_LENGTH."""

    name: str
    read: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # as the settings ask
    places: dict[str, list[Place]] = field(default_factory=dict)  # of the first rows of each reason and change
    changes: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)  # columns
    first_dropped: str = ""
    lengths: Counter[int] = field(default_factory=Counter)
    cut: int = 0
    tokens: int = 0
    tokens_lost: int = 0
    supervised: int = 0
    latest_answer: int = 0  # where, in tokens, the latest answer begins of those that MAX_LENGTH cuts off
    sample: str = ""

    def drop(self, reason: str, place: Place, row: str = "") -> None:
        """Count a row that cannot be used."""
        self.first_dropped = self.first_dropped or (f"{place}: {excerpt(row)}" if row else "")
        if reason not in self.dropped and len(self.dropped) >= MOST_REASONS:
            reason = "another reason"  # reasons may quote the rows, of which there may be millions
        self.dropped[reason] += 1
        self._note(reason, place)

    def leave_out(self, reason: str, place: Place) -> None:
        """Count a row that the settings leave out."""
        self.left_out[reason] += 1
        self._note(reason, place)

    def change(self, changes: Counter[str], place: Place) -> None:
        """Count what was altered in a row."""
        self.changes.update(changes)
        for change in changes:
            self._note(change, place)

    def _note(self, reason: str, place: Place) -> None:
        if len(first := self.places.setdefault(reason, [])) < 3:
            first.append(place)

    def use(self, length: int, kept: int, supervised: int) -> None:
        """Count a row of `length` tokens of which `kept` stay and `supervised` are learned."""
        self.used += 1
        self.lengths[length] += 1
        self.cut += kept < length
        self.tokens += kept
        self.tokens_lost += length - kept
        self.supervised += supervised

    def of(self, name: str, rows: Iterable[tuple[int, int, int]]) -> "Account":
        """The account of some of the rows, given as (length, kept, supervised) each; drops are those of the whole."""
        part = Account(name, self.read, dropped=self.dropped, left_out=self.left_out, places=self.places,
                       changes=self.changes, shapes=self.shapes, unused=self.unused, sample=self.sample)  # fmt: skip
        for row in rows:
            part.use(*row)
        return part

    def percentiles(self) -> dict[str, int]:
        """Length that a share of the used rows does not exceed, by that share in per cent."""
        ordered, found, seen = sorted(self.lengths.items()), {}, 0
        shares = iter(PERCENTILES)
        share = next(shares)
        for length, count in ordered:
            seen += count
            while share and seen * 100 >= share * self.used:
                found[f"p{share}"] = length
                share = next(shares, 0)
        return found

    def as_record(self) -> dict[str, Any]:
        """The counts, for run.json."""
        skipped = ("lengths", "places", "name", "first_dropped")
        values = {key: value for key, value in vars(self).items() if key not in skipped}
        return values | {"longest": max(self.lengths, default=0), "length_percentiles": self.percentiles()}

    def refuse_too_few(self, config: Config, names: str) -> None:
        """Refuse when no row is left, or when more than MAX_DROPPED_FRACTION of them are dropped."""
        dropped, most = self.dropped.total(), config.max_dropped_fraction
        if not self.used:
            left_out = "; ".join(f"{count:,} × {reason}" for reason, count in self.left_out.items())
            reasons = "; ".join(filter(None, (self.reasons(), left_out))) or "there are none"
            shown = f"; {self.first_dropped}" if self.first_dropped else ""
            raise Refusal(
                f"no usable {self.name} rows in {names} (read {self.read:,}, dropped {dropped:,}): {reasons}{shown}",
                self._way_out(),
            )
        given = "max_dropped_fraction" in config.model_fields_set
        if dropped > most * self.read and (given or dropped > A_GLANCE):
            raise Refusal(
                f"{dropped:,} of {self.read:,} {self.name} rows cannot be used, more than "
                f"MAX_DROPPED_FRACTION={most:g} lets go: {self.reasons()}",
                "mend or remove those rows, or raise MAX_DROPPED_FRACTION",
            )

    def _way_out(self) -> str:
        if self.latest_answer:
            return f"raise MAX_LENGTH above {self.latest_answer:,}, where the latest answer begins"
        if self.left_out:
            return "raise MAX_LENGTH, or set LONG_ROWS=cut"
        if not self.read:
            return "bring a file or a split with rows"
        return "mend the rows, or name their columns with PROMPT_COLUMN and COMPLETION_COLUMN"

    def seen(self) -> str:
        """The columns that rows were known by, each with its count where they differ."""
        if len(self.shapes) == 1:
            return next(iter(self.shapes))
        return "; ".join(f"{shape} ({count:,} rows)" for shape, count in self.shapes.most_common(4))

    def reasons(self) -> str:
        """The dropped rows by reason, each with the first places."""
        return "; ".join(f"{count:,} × {reason}{self.first(reason)}" for reason, count in self.dropped.most_common())

    def first(self, reason: str) -> str:
        """The first places of a reason or change, in brackets."""
        return f" (first: {_listed(self.places[reason])})"

    def report(self, max_length: int) -> None:
        """Say all of it, before the first step."""
        say(f"{self.name} rows: {self.read:,} read, {self.used:,} used, known by the columns {self.seen()}")
        if self.unused:
            say(f"{self.name} rows: columns not used: {', '.join(name for name, _ in self.unused.most_common(20))}")
        if self.dropped:
            dropped = self.dropped.total()
            warn(f"{self.name} rows: dropped {dropped:,} of {self.read:,}: {self.reasons()}")
        for reason, count in self.left_out.items():
            say(f"{self.name} rows: left out {count:,} of {self.read:,}, as asked: {reason}{self.first(reason)}")
        for change, count in self.changes.items():
            warn(f"{self.name} rows: {count:,} times {change}{self.first(change)}")
        lengths = ", ".join(f"{share} {length:,}" for share, length in self.percentiles().items())
        say(f"{self.name} rows: lengths in tokens {lengths}; supervised tokens {self.supervised:,} of {self.tokens:,}")
        if self.cut:
            share = self.tokens_lost / (self.tokens + self.tokens_lost)
            warn(
                f"{self.name} rows over MAX_LENGTH={max_length}: {self.cut:,} of {self.used:,} lose their end, "
                f"{share:.1%} of all tokens; longest {max(self.lengths):,} tokens (LONG_ROWS=drop leaves them out)"
            )
        say(f"one {self.name} row, learned between ⟦ and ⟧:\n{shortened(self.sample, SAMPLE_CHARACTERS)}")


def _listed(places: list[Place]) -> str:
    """Places of rows, the file named once: rows 2, 6 of train.jsonl."""
    files = {place.file: [str(other.row) for other in places if other.file == place.file] for place in places}
    return ", ".join(
        f"row{'s' * (len(rows) > 1)} {', '.join(rows)} of {Path(file).name}" for file, rows in files.items()
    )


def unknown_shape(problem: str, place: Place, row: str, shapes: str) -> Refusal:
    """The refusal of rows that no rule knows, by the first of them."""
    return Refusal(
        f"{place}: {problem}: {excerpt(row)}",
        f"name the columns {shapes}; or say with PROMPT_COLUMN and COMPLETION_COLUMN which they are",
    )
