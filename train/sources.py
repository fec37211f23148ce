"""Where rows come from: local files and folders, folders that `datasets` saved, and the Hub; splits and slices of them."""

import hashlib
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import datasets
from huggingface_hub.errors import HfHubHTTPError
from yaml import YAMLError

from train import files
from train.config import Config
from train.console import Exit, Refusal, warn

# The name the course prints for its dataset does not exist.
WRONG_NAMES = {"databricks/dolly-15k": "databricks/databricks-dolly-15k"}
READ_HERE = ("json", "csv", "parquet")  # the kinds of files that `datasets` finds and `files` reads
# Files in which `datasets` keeps what save_to_disk wrote.
SAVED = ("dataset_dict.json", "state.json")


class Place(NamedTuple):
    """Where a row stands: file or Hub name, row from 1, and line from 1 where the file has lines."""

    file: str
    row: int
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}" + (f" (line {self.line})" if self.line else "")


@dataclass(frozen=True)
class Source:
    """One dataset of those that DATASET or EVAL_DATASET (`setting`) names.

    `weight` says how often its rows are seen in an epoch; `split` None takes the first of validation, test and train.
    """

    name: str
    setting: str
    split: str | None
    config: str | None = None
    revision: str | None = None
    weight: float = 1


def to_train(config: Config) -> list[Source]:
    """The datasets of DATASET."""
    weights = config.dataset_weights or [1.0] * len(config.dataset)
    return [
        replace(source, split=source.split or config.default_split, weight=weight)
        for source, weight in zip(_named(config, "dataset"), weights, strict=True)
    ]


def to_evaluate(config: Config) -> list[Source]:
    """The datasets of EVAL_DATASET."""
    return list(_named(config, "eval_dataset"))


def _named(config: Config, of: str) -> Iterator[Source]:
    each = (config.each(getattr(config, f"{of}_{part}"), of) for part in ("split", "config", "revision"))
    for name, split, subset, revision in zip(getattr(config, of), *each, strict=True):
        yield Source(name, of.upper(), split, subset, revision)


def fingerprint(names: Iterable[str]) -> str | None:
    """SHA-256 over the names and bytes of the local files and folders among them; None where there are none."""
    digest, local = hashlib.sha256(), False
    for path in map(Path, names):
        if not files.exists(path):
            continue
        local = True
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest() if local else None


def read(source: Source, streaming: bool = False) -> Iterator[tuple[Place, Any]]:
    """The rows of a source, one after another, with where each stands.

    Args:
        streaming: read a Hub dataset over the network as it is needed, without storing it.

    Raises:
        Refusal: the name, split or configuration does not exist, or a file cannot be read.
    """
    name, setting = source.name, source.setting
    if name in WRONG_NAMES:
        raise Refusal(f'there is no dataset "{name}"', f"set {setting}={WRONG_NAMES[name]}")
    path = Path(name)
    if files.is_path(name) and not files.exists(path):
        raise Refusal(f"there is no file or folder {name}", f"set {setting} to a path that exists, or to a Hub name")
    try:
        if not files.is_path(name):
            yield from _typed(_from_hub(source, streaming), source)
        elif path.is_file():
            yield from _sliced({"train": [path]}, source)
        elif any((path / file).is_file() for file in SAVED):
            yield from _typed(_one_split(datasets.load_from_disk(str(path)), source), source)
        else:
            yield from _sliced(_files_of(path, source), source)
    except (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise Refusal(
            f'dataset "{name}" cannot be had: {_first_line(error)}',
            f"check {setting} and its revision; a private or gated dataset needs HF_TOKEN; offline, use a local file",
            Exit.MACHINE if isinstance(error, ConnectionError) else Exit.SETTINGS,
        ) from error
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetGenerationError, StopIteration) as error:
        raise _refusal(error.__cause__ or error, source) from error


def _refusal(error: BaseException, source: Source) -> Refusal:
    what = f'dataset "{source.name}"' + (f", split {source.split}" if source.split else "") + ": "
    if "scripts are no longer supported" in str(error):
        return Refusal(
            f'dataset "{source.name}" is a Python loading script, which is not supported and was not run',
            f"set {source.setting}_REVISION=refs/convert/parquet, its Parquet branch on the Hub, or export it to JSONL",
        )
    if "Config name is missing" in str(error):
        names = str(error).partition("available configs:")[2].strip().split("\n")[0]
        return Refusal(f"{what}it has several configurations: {names}", f"set {source.setting}_CONFIG to one of them")
    return Refusal(
        what + _first_line(error),
        f"check {source.setting}, {source.setting}_SPLIT and {source.setting}_CONFIG, and the files",
    )


@lru_cache(maxsize=64)  # rows are read twice: looked for once, they are the same, and so is what is said
def _files_of(folder: Path, source: Source) -> dict[str, list[Path]]:
    """The data files of each split of a folder, as `datasets` finds them: by name, by subfolder, or by README.md."""
    if folder.resolve() in (Path("/"), Path("~").expanduser()):
        raise Refusal(f"{source.setting}={folder} is everything there is", "name the folder with the rows")
    try:
        builder = datasets.load_dataset_builder(str(folder.resolve()), source.config)
    except (YAMLError, BadZipFile, TypeError, AttributeError, KeyError, IndexError) as error:
        raise Refusal(
            f"{folder}: which files to read cannot be found out: {_first_line(error)}",
            "name the files in DATASET; or mend or remove README.md, whose header may say which they are",
        ) from error
    found = {
        str(split): [Path(str(file)) for file in some] for split, some in (builder.config.data_files or {}).items()
    }
    if builder.__module__.rpartition(".")[2] not in READ_HERE:
        raise Refusal(f"{folder} holds no files of a known kind", f"bring one of: {', '.join(files.SUFFIXES)}")
    if builder.config.name == "default":
        taken = {file.resolve() for some in found.values() for file in some}
        others = [p for p in sorted(folder.rglob("*")) if files.suffix(p) and p.resolve() not in taken]
        if others:
            listed = ", ".join(str(file.relative_to(folder)) for file in others[:5])
            warn(f"{folder}: {len(others)} files of another kind or split are left out: {listed}; a file can be named")
    return found


def _sliced(splits: dict[str, list[Path]], source: Source) -> Iterator[tuple[Place, Any]]:
    """The rows of `source.split`, which may be a slice such as train[:1000] or a sum of several."""
    wanted = source.split or _default(splits, "train")
    instruction = datasets.ReadInstruction.from_spec(wanted)
    lengths = dict.fromkeys(splits, sys.maxsize)
    if "%" in wanted or "-" in wanted:
        lengths = {name: sum(1 for file in some for _ in files.read(file)) for name, some in splits.items()}
    parts = instruction.to_absolute(lengths)
    for part in parts:
        rows = chain.from_iterable(_placed(file) for file in splits[part.splitname])
        yield from islice(rows, part.from_ or 0, part.to)


def _default(splits: Container[str], otherwise: str) -> str:
    """The split to evaluate on where none is given."""
    return next((name for name in ("validation", "test", "train") if name in splits), otherwise)


def _placed(file: Path) -> Iterator[tuple[Place, Any]]:
    for number, (line, row) in enumerate(files.read(file), start=1):
        yield Place(str(file), number, line), row


def _one_split(saved: Any, source: Source) -> datasets.Dataset:
    """The split of what `save_to_disk` wrote; one saved without splits is called train."""
    splits = saved if isinstance(saved, dict) else {"train": saved}
    wanted = source.split or _default(splits, "train")
    (part, *more) = datasets.ReadInstruction.from_spec(wanted).to_absolute({n: len(s) for n, s in splits.items()})
    if more:
        raise Refusal(f"{source.name} was saved by datasets: one split of it at a time", f"set {source.setting}_SPLIT")
    rows = splits[part.splitname]
    return rows.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))


def _from_hub(source: Source, streaming: bool) -> Any:
    split = source.split
    if split is None:
        found = datasets.get_dataset_split_names(source.name, source.config, revision=source.revision)
        split = _default(found, found[0])
    if streaming:  # a stream knows no slices
        split, _, part = split.partition("[")
        if part:
            raise Refusal("STREAMING=true reads whole splits", f"leave [{part} out of {source.setting}_SPLIT")
    return datasets.load_dataset(source.name, source.config, split=split, revision=source.revision, streaming=streaming)


def _typed(rows: Any, source: Source) -> Iterator[tuple[Place, Any]]:
    """Rows of a `datasets.Dataset` or a stream of them; images and sounds stay the bytes they are."""
    for column, feature in (rows.features or {}).items():
        if hasattr(feature, "decode_example"):
            rows = rows.cast_column(column, type(feature)(decode=False))
    for number, row in enumerate(rows, start=1):
        yield Place(source.name, number), {name: files.without_fill(cell) for name, cell in row.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
