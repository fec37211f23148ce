"""The rows of a run: read from every source, shaped, deduplicated, weighted, tokenised, and accounted for."""

import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from datasets.arrow_writer import ArrowWriter

from train import sources
from train.account import Account, unknown_shape
from train.columns import SHAPES, UnknownShape
from train.config import Config
from train.console import Refusal, progress, say
from train.data import Shaper
from train.sources import Place, Source
from train.templates import ChatTemplate
from train.tokens import tokenise
from train.turns import Row, UnusableRow

# Of a stream over the network, this many rows are looked at before anything else is downloaded.
PEEK = 100
FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "length": datasets.Value("int64"),
        "supervised": datasets.Value("int64"),
    }
)
LEARNED = ["input_ids", "labels"]  # the columns that the trainer gets


class Rows(NamedTuple):
    """Rows ready for the trainer (columns input_ids and labels, lists of int of equal length), and their account."""

    rows: datasets.Dataset
    account: Account


def named(config: Config) -> dict[str, list[Source]]:
    """The sources to train on and, where there are some, to evaluate on."""
    found = {"train": sources.to_train(config), "eval": sources.to_evaluate(config)}
    return {name: some for name, some in found.items() if some}


def shaped(some: list[Source], config: Config, account: Account, peek: bool = False) -> Iterator[tuple[Place, Row]]:
    """Every usable row of the sources, shaped, as often as its source's weight says; the others are counted.

    Args:
        peek: of a stream over the network, look at the first rows only.

    Raises:
        Refusal: a source cannot be read, or the first row of one has a shape that no rule knows.
    """
    shape = Shaper(config, account.shapes, account.unused)
    seen: set[bytes] = set()
    for source in some:
        given = 0
        for place, row in _usable(source, shape, config, account, peek):
            if config.deduplicate and not _is_new(row, seen):
                account.leave_out("equal to an earlier row", place)
                continue
            account.change(shape.changes, place)
            # Copies spread evenly: after n rows of weight w, ⌊n × w⌋ are handed on.
            given += 1
            copies = int(given * source.weight) - int((given - 1) * source.weight)
            if not copies:
                account.leave_out(f"DATASET_WEIGHTS={source.weight:g}", place)
            for _ in range(copies):
                yield place, row


def _usable(source: Source, shape: Shaper, config: Config, account: Account, peek: bool) -> Iterator[tuple[Place, Row]]:
    most = min(config.max_rows or sys.maxsize, PEEK if peek and config.streaming else sys.maxsize)
    for number, (place, raw) in enumerate(islice(sources.read(source, config.streaming), most)):
        account.read += 1
        try:
            yield place, shape(raw)
        except UnusableRow as error:
            if number == 0 and isinstance(error, UnknownShape):
                raise unknown_shape(str(error), place, _as_text(raw), SHAPES) from error
            account.drop(str(error), place, "" if account.first_dropped else _as_text(raw))


def _is_new(row: Row, seen: set[bytes]) -> bool:
    digest = blake2b(_as_text(row).encode(), digest_size=16).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def survey(config: Config) -> dict[str, Account]:
    """Read every row once, before anything is downloaded; the accounts, by name, count those of a usable shape.

    Raises:
        Refusal: a file is broken, no rule knows its shape, or too few rows are usable.
    """
    accounts = {}
    for name, some in named(config).items():
        account = Account(name)
        for _ in progress(shaped(some, config, account, peek=True), f"reading {name} rows"):
            account.used += 1
        _finish(account, some, config)
        accounts[name] = account
    return accounts


def account_for(config: Config, template: ChatTemplate, surveyed: dict[str, Account]) -> dict[str, Account]:
    """Tokenise every row, keep none, and report what was found.

    Raises:
        Refusal: too few rows are usable.
    """
    accounts = {}
    for name, some in named(config).items():
        accounts[name] = Account(name)
        for _ in _tokenised(some, config, template, accounts[name], surveyed[name].used):
            pass
        _finish(accounts[name], some, config)
        accounts[name].report(config.max_length)
    if config.eval_fraction:
        held_out = _held_out(accounts["train"].used, config)
        say(f"of the train rows, {held_out:,} are held out for evaluation (EVAL_FRACTION={config.eval_fraction:g})")
    return accounts


def load(config: Config, template: ChatTemplate, surveyed: dict[str, Account]) -> tuple[Rows, Rows | None]:
    """Rows to train on and, where asked for, to evaluate on; kept on disk and mapped into memory.

    Args:
        surveyed: the accounts of `survey`.

    Raises:
        Refusal: too few rows are usable.
    """
    loaded = {}
    for name, some in named(config).items():
        account = Account(name)
        loaded[name] = Rows(_on_disk(_tokenised(some, config, template, account, surveyed[name].used)), account)
        _finish(account, some, config)
    if config.eval_fraction:
        loaded = _split(loaded["train"], config)
    for done in loaded.values():
        done.account.report(config.max_length)
    ready = {name: done._replace(rows=done.rows.select_columns(LEARNED)) for name, done in loaded.items()}
    return ready["train"], ready.get("eval")


def _tokenised(
    some: list[Source], config: Config, template: ChatTemplate, account: Account, total: int
) -> Iterator[Row]:
    usable = shaped(some, config, account)
    known = None if config.streaming else total
    return tokenise(
        progress(usable, f"tokenising {account.name} rows", known),
        template,
        config.max_length,
        config.completion_only_loss,
        config.long_rows == "drop",
        account,
    )


def _on_disk(rows: Iterator[Row]) -> datasets.Dataset:
    """The rows in a file that is mapped into memory and, having no name any more, goes with the process."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=cache) as folder:
        file = f"{folder}/rows.arrow"
        with ArrowWriter(path=file, features=FEATURES) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        return datasets.Dataset.from_file(file)


def _split(whole: Rows, config: Config) -> dict[str, Rows]:
    """The rows parted at random into those to train on and the EVAL_FRACTION to evaluate on."""
    held_out = _held_out(len(whole.rows), config)
    order = list(range(len(whole.rows)))
    random.Random(config.seed).shuffle(order)
    halves = {"train": order[held_out:], "eval": order[:held_out]}
    parts = {name: whole.rows.select(some, keep_in_memory=True) for name, some in halves.items()}
    return {name: Rows(part, whole.account.of(name, _counted(part, config))) for name, part in parts.items()}


def _held_out(count: int, config: Config) -> int:
    """How many of the rows are to evaluate on.

    Raises:
        Refusal: all of them.
    """
    held_out = math.ceil(count * config.eval_fraction)
    if held_out == count:
        raise Refusal(f"EVAL_FRACTION={config.eval_fraction} of {count} rows leaves none to train on", "lower it")
    return held_out


def _counted(part: datasets.Dataset, config: Config) -> Iterator[tuple[int, int, int]]:
    for length, supervised in zip(part["length"], part["supervised"], strict=True):
        yield length, min(length, config.max_length), supervised


def _finish(account: Account, some: list[Source], config: Config) -> None:
    account.refuse_too_few(config, ", ".join(source.name for source in some))


def _as_text(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)
