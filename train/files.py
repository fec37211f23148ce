"""Local files to rows, read as a stream and known by their content: JSON (lines, array, objects in a row), CSV, Parquet.

Every cell stays as it is written. What cannot be read is refused with file, line and the first 80 characters.
"""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.parquet

from train.console import Refusal, excerpt

# A line number (None in Parquet, which has no lines) and the row: an object, unless the file holds something else.
Numbered = tuple[int | None, Any]

JSON, CSV, PARQUET = (".json", ".jsonl", ".ndjson"), (".csv", ".tsv"), (".parquet",)
SUFFIXES = JSON + CSV + PARQUET
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
CHUNK = 2**20  # characters read at a time
# A literal or an escape that the end of the buffer cuts short is shorter than this.
LONGEST_LITERAL = 16

csv.field_size_limit(2**31 - 1)


def is_path(name: str) -> bool:
    """Whether a name means a local file or folder, there or not, and not a repository on the Hub."""
    return bool(re.match(r"[./~]", name)) or bool(suffix(Path(name))) or exists(Path(name))


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, for this user."""
    return os.access(path, os.F_OK)


def suffix(path: Path) -> str:
    """The known suffix of a file name, below one of compression; empty where there is none."""
    name = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower())
    return next((known for known in SUFFIXES if name.endswith(known)), "")


def read(path: Path) -> Iterator[Numbered]:
    """The rows of a file, in bounded memory.

    Raises:
        Refusal: the file cannot be opened, is of no known kind, or breaks off the form it has.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
        if start.startswith(b"PAR1") or suffix(path) in PARQUET:
            yield from _parquet(path)
            return
        opened = next((way for magic, way in COMPRESSED.items() if start.startswith(magic)), open)
        with opened(path, "rb") as stream:
            head = stream.read(4096)
        yield from _text(path, opened, head)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, opened) from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise Refusal(f"{path} cannot be unpacked: {error}", "pack or copy it again") from error
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror or error}", "check the file and its owner") from error


def _text(path: Path, opened: Callable[..., Any], head: bytes) -> Iterator[Numbered]:
    if head.startswith(UTF16) or (b"\0" in head[:2] and suffix(path)):
        raise Refusal(f"{path} is UTF-16, save it as UTF-8", "editors offer the encoding when saving")
    looks_like_json = re.match(rb"(\xef\xbb\xbf)?\s*(\{\s*(\"|\}|$)|\[\s*(\{|\[|\]|$))", head)
    if not looks_like_json and suffix(path) not in JSON + CSV:
        raise Refusal(f"{path} is of no known kind", f"bring one of: {', '.join(SUFFIXES)}")
    # A byte order mark, as Windows editors write it, is no part of the text.
    with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
        if looks_like_json or suffix(path) in JSON:
            yield from _json(path, stream)
        else:
            yield from _csv(path, stream)


def _json(path: Path, stream: TextIO) -> Iterator[Numbered]:
    """Values one after another, with commas between them or not, in an array or not, on as many lines as they like."""
    decode, separators = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n,]*")
    text, at, line, array, flat, ended = "", 0, 1, 0, True, False
    while True:
        end = separators.match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", at, end)
        at = end
        if at == len(text):
            if ended:
                break
            text, at = stream.read(CHUNK), 0
            ended = not text
            continue
        if text[at] == ("]" if array else "["):
            array = 0 if array else line
            at += 1
            continue
        error: ValueError | RecursionError | None = None
        try:
            row, end = decode(text, at)
            cut_short = end == len(text) and text[at] not in '{["'  # the digits of a number may go on
        except (ValueError, RecursionError) as problem:
            error = problem
            cut_short = isinstance(problem, json.JSONDecodeError) and (
                problem.msg.startswith("Unterminated string") or problem.pos > len(text) - LONGEST_LITERAL
            )
        if cut_short and not ended:
            more = stream.read(max(CHUNK, len(text) - at))
            text, at, ended = text[at:] + more, 0, not more
            continue
        if error:
            raise _broken_json(path, text, at, line, flat, error) from error
        yield line, row
        lines = text.count("\n", at, end)
        line, at, flat = line + lines, end, flat and not lines
    if array:
        raise Refusal(f"{path}: the array that line {array} opens has no end", "the file was cut off: copy it again")


def _broken_json(path: Path, text: str, at: int, line: int, flat: bool, error: ValueError | RecursionError) -> Refusal:
    """The refusal of a broken value: by its own line where values have one each, else by the line of the error."""
    own = text[at:].split("\n", 1)[0]
    if flat and own.strip() not in ("{", "["):
        try:
            json.loads(own)
        except (ValueError, RecursionError) as problem:
            error = problem
        shown = own
    elif isinstance(error, json.JSONDecodeError):
        line += text.count("\n", at, error.pos)
        shown = text[text.rfind("\n", 0, error.pos) + 1 :].split("\n", 1)[0]
    else:
        shown = own
    reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return Refusal(
        f"{path}, line {line}: not JSON ({reason}): {excerpt(shown)}",
        "repair or remove that line; DATASET holds one JSON object a line, or one array of objects",
    )


def _csv(path: Path, stream: TextIO) -> Iterator[Numbered]:
    """Records of a table with a header; the separator is a tab in .tsv, else the most frequent one in the header."""
    first = stream.readline()
    separator = "\t" if suffix(path) == ".tsv" else max(",;\t|", key=first.count)
    reader = csv.reader(chain([first], stream) if first else stream, delimiter=separator, strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        if repeated := [name for name in header if header.count(name) > 1]:
            raise Refusal(f"{path} has several columns called {excerpt(repeated[0])}", "give each a name of its own")
        line = reader.line_num
        for cells in reader:
            begun, line = line + 1, reader.line_num
            if not cells:
                continue
            if len(cells) != len(header):
                raise Refusal(
                    f"{path}, line {begun}: expected {len(header)} fields, found {len(cells)}: "
                    f"{excerpt(separator.join(cells))}",
                    'put cells that hold the separator or a line break between quotes: "a, b"',
                )
            yield begun, {name: cell.replace("\r\n", "\n") for name, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise Refusal(
            f"{path}, line {reader.line_num}: not CSV ({error})",
            "a cell with quotes, separators or line breaks stands between quotes, and quotes in it are doubled",
        ) from error


def _parquet(path: Path) -> Iterator[Numbered]:
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    yield None, {name: without_fill(cell) for name, cell in row.items()}
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise Refusal(f"{path} cannot be read as Parquet: {reason}", "copy or export it again") from error


def without_fill(cell: Any) -> Any:
    """A typed cell without the nulls that Arrow puts where a row lacks another row's keys."""
    if isinstance(cell, dict):
        return {key: without_fill(value) for key, value in cell.items() if value is not None}
    return [without_fill(value) for value in cell] if isinstance(cell, list) else cell


def _not_utf8(path: Path, opened: Callable[..., Any]) -> Refusal:
    """The refusal of a file with a byte that is no UTF-8, by the line it is in."""
    with opened(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                shown = excerpt(line.decode(errors="replace"))
                return Refusal(
                    f"{path}, line {number}: is not UTF-8 ({error.reason}): {shown}", "save the file as UTF-8"
                )
    return Refusal(f"{path} is not UTF-8", "save the file as UTF-8")
