"""Rows of any known shape to `messages`, `prompt`/`completion` or `text`; nothing about models.

A shape is known by the columns:

    messages, or conversations (ShareGPT)   chat turns; the last answer may be followed by nothing else
    prompt + completion                     TRL's pair, as text (used verbatim) or as chat turns
    instruction/question/… + output/…       one question and one answer, with an optional input or context
    text                                    plain text
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.errors import HfHubHTTPError

from train.console import Exit, Refusal

Row = dict[str, Any]

# The name the course prints for its dataset does not exist.
WRONG_NAMES = {"databricks/dolly-15k": "databricks/databricks-dolly-15k"}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # else the answer "None" is read as missing
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
}
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


def load(name: str, split: str, config: str | None = None, revision: str | None = None) -> datasets.Dataset:
    """One split of a local file, a local folder or a Hub dataset.

    Raises:
        Refusal: the name, split or configuration does not exist, or a file cannot be read.
    """
    if name in WRONG_NAMES:
        raise Refusal(f'there is no dataset "{name}"', f"set DATASET={WRONG_NAMES[name]}")
    path = Path(name).expanduser()
    if re.match(r"[./~]", name) and not path.exists():
        raise Refusal(f"there is no file or folder {name}", "set DATASET to a path that exists, or to a Hub name")
    try:
        if path.is_file():
            if path.suffix.lower() not in READERS:
                raise Refusal(f"{name} is of no known kind", f"bring one of: {', '.join(READERS)}")
            reader, options = READERS[path.suffix.lower()]
            return datasets.load_dataset(reader, data_files=str(path), split=split, **options)
        return datasets.load_dataset(str(path) if path.is_dir() else name, config, split=split, revision=revision)
    except (datasets.exceptions.DatasetNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise Refusal(
            f'dataset "{name}" cannot be had: {_first_line(error)}',
            "check DATASET and DATASET_REVISION; a private or gated dataset needs HF_TOKEN; offline, use a local file",
            Exit.MACHINE if isinstance(error, ConnectionError) else Exit.SETTINGS,
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError, StopIteration) as error:
        cause = error.__cause__ or error
        raise Refusal(
            f'dataset "{name}", split {split}: {_first_line(cause)}',
            "check DATASET_SPLIT and DATASET_CONFIG, and that the file holds one JSON object, or one CSV record, per row",
        ) from error


def load_eval(name: str, split: str | None) -> datasets.Dataset:
    """Evaluation rows: the split named, else the first of validation, test and train that the dataset has."""
    if split:
        return load(name, split)
    splits = ["train"] if Path(name).is_file() else datasets.get_dataset_split_names(name)
    return load(name, next((s for s in ("validation", "test", "train") if s in splits), splits[0]))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def fingerprint(name: str) -> str | None:
    """SHA-256 over the names and bytes of a local file or folder; None for a Hub name."""
    path = Path(name).expanduser()
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
    """A cell as text; blank, missing and nested cells are not."""
    if isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(reason)
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
