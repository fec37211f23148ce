"""Rows of any known shape to `messages`, `prompt`/`completion` or `text`; nothing about models.

A shape is known by the columns:

    messages, or conversations (ShareGPT)   chat turns, one of them an answer
    prompt + completion                     TRL's pair, as text (used verbatim) or as chat turns
    instruction/question/… + output/…       one question and one answer, with an optional input or context
    text                                    plain text
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas
from huggingface_hub.errors import HfHubHTTPError

from train.console import Exit, Refusal

Row = dict[str, Any]

# The name the course prints for its dataset does not exist.
WRONG_NAMES = {"databricks/dolly-15k": "databricks/databricks-dolly-15k"}
READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
QUESTIONS = ("instruction", "question", "query", "prompt")
ANSWERS = ("output", "response", "answer", "completion")
CONTEXTS = ("input", "context")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatbot"), "assistant"),
    "system": "system",
}


class UnusableRow(Exception):
    """A row that cannot be trained on; its text is the reason, counted and reported by whoever reads rows."""


def load(
    name: str, split: str | None, config: str | None = None, revision: str | None = None, setting: str = "DATASET"
) -> datasets.Dataset:
    """One split of a local file, a local folder or a Hub dataset.

    Args:
        split: name and slice; None takes the first of validation, test and train that there is.
        setting: the setting that gave the name, for messages.

    Raises:
        Refusal: the name, split or configuration does not exist, or a file cannot be read.
    """
    if name in WRONG_NAMES:
        raise Refusal(f'there is no dataset "{name}"', f"set {setting}={WRONG_NAMES[name]}")
    path = Path(name)
    if re.match(r"[./~]", name) and not path.exists():
        raise Refusal(f"there is no file or folder {name}", f"set {setting} to a path that exists, or to a Hub name")
    if path.is_file() and path.suffix.lower() not in READERS:
        raise Refusal(f"{name} is of no known kind", f"bring one of: {', '.join(READERS)}")
    try:
        if path.is_file():
            return _load_file(path, split or "train")
        split = split or _evaluation_split(name, config, revision)
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise Refusal(
            f'dataset "{name}" cannot be had: {_first_line(error)}',
            f"check {setting} and its revision; a private or gated dataset needs HF_TOKEN; offline, use a local file",
            Exit.MACHINE if isinstance(error, ConnectionError) else Exit.SETTINGS,
        ) from error
    except (
        ValueError,
        RuntimeError,
        PermissionError,
        datasets.exceptions.DatasetGenerationError,
        StopIteration,
    ) as error:
        cause = error.__cause__ or error
        raise Refusal(
            f'dataset "{name}"' + (f", split {split}" if split else "") + f": {_first_line(cause)}",
            f"check {setting}, {setting}_SPLIT and DATASET_CONFIG, and that the file holds one JSON object, or one CSV "
            "record, per row",
        ) from error


def _evaluation_split(name: str, config: str | None, revision: str | None) -> str:
    splits = datasets.get_dataset_split_names(name, config, revision=revision)
    return next((s for s in ("validation", "test", "train") if s in splits), splits[0])


def _load_file(path: Path, split: str) -> datasets.Dataset:
    """A local file's rows with every cell as it is written: an answer 007, 3.10, None or 2024-01-02 stays that."""
    options: dict[str, Any] = {}
    if READERS[path.suffix.lower()] == "csv":
        options = {"sep": "\t" if path.suffix.lower() == ".tsv" else ",", "keep_default_na": False}
        header = pandas.read_csv(path, sep=options["sep"], nrows=0)
        options["features"] = datasets.Features({column: datasets.Value("string") for column in header.columns})
    rows = datasets.load_dataset(READERS[path.suffix.lower()], data_files=str(path), split=split, **options)
    if READERS[path.suffix.lower()] == "json" and (features := _dates_as_text(rows.features)) != rows.features:
        rows = datasets.load_dataset("json", data_files=str(path), split=split, features=features)
    return rows


def _dates_as_text(feature: Any) -> Any:
    """The features, without the timestamps that the JSON reader makes of text that looks like a date."""
    if isinstance(feature, dict):
        return type(feature)({name: _dates_as_text(part) for name, part in feature.items()})
    if isinstance(feature, datasets.List):
        return datasets.List(_dates_as_text(feature.feature))
    return datasets.Json() if str(feature.dtype).startswith("timestamp") else feature


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def fingerprint(name: str) -> str | None:
    """SHA-256 over the names and bytes of a local file or folder; None for a Hub name."""
    path = Path(name)
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def shaper(columns: Sequence[str]) -> tuple[str, Callable[[Row], Row]]:
    """The shape that the columns have, in words, and the function that brings one of its rows to a known form.

    Raises:
        Refusal: no known shape has these columns.
    """
    by_name = {column.lower(): column for column in columns}

    def first(names: Sequence[str]) -> str | None:
        return next((by_name[name] for name in names if name in by_name), None)

    if turns := first(("messages", "conversations", "conversation")):
        return f"chat turns in {turns}", lambda row: {"messages": _turns(row[turns])}
    if "prompt" in by_name and "completion" in by_name:
        prompt, completion = by_name["prompt"], by_name["completion"]
        return "prompt and completion", lambda row: _pair(row[prompt], row[completion])
    if (question := first(QUESTIONS)) and (answer := first(ANSWERS)):
        context = first(CONTEXTS)
        described = f"{question}, {answer}" + (f" and optional {context}" if context else "")
        return described, lambda row: _question(row[question], row[context] if context else None, row[answer])
    if text := first(("text",)):
        return "plain text", lambda row: {"text": _text(row[text], "empty text")}
    raise Refusal(
        f"no known shape has the columns {', '.join(columns)}",
        "name the columns messages; or prompt and completion; or instruction and output (with input); or text",
    )


def _text(value: Any, reason: str) -> str:
    """A cell as text: numbers and truth values as JSON writes them.

    Raises:
        UnusableRow: the cell is missing or blank (`reason`), or it is nested or a date.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnusableRow(reason)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str):
        raise UnusableRow(f"a {type(value).__name__} where text belongs")
    return value


def _question(question: Any, context: Any, answer: Any) -> Row:
    asked = _text(question, "empty question")
    if isinstance(context, str) and context.strip():
        asked = f"{asked}\n\n{context}"
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": _text(answer, "empty answer")},
        ]
    }


def _pair(prompt: Any, completion: Any) -> Row:
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        completion = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        return {"messages": _turns(prompt + completion)}
    return {"prompt": _text(prompt, "empty prompt"), "completion": _text(completion, "empty answer")}


def _turns(turns: Any) -> list[Row]:
    """Chat turns with the roles and keys that chat templates know."""
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("no turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise UnusableRow("a turn without role and content")
        spoken = turn.get("role", turn.get("from"))
        role = ROLES.get(str(spoken).lower())
        if role is None:
            raise UnusableRow(f'role "{spoken}"')
        content = turn.get("content", turn.get("value"))
        if isinstance(content, list):
            content = "".join(part.get("text") or part.get("value") or "" for part in content)
        messages.append({"role": role, "content": _text(content, f"empty {role} turn")})
    if all(message["role"] != "assistant" for message in messages):
        raise UnusableRow("no assistant turn")
    return messages
