"""Rows to token ids and labels: what the model reads, what it learns, where it stops, what is cut.

A row ends with a token at which generation stops, and that token is learned, unless MAX_LENGTH cuts the row's end off.
A row starts with one BOS at most.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import datasets
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from train.console import Refusal, say, warn
from train.data import Row, UnusableRow

IGNORED = -100  # the label that the loss skips
COLUMNS = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int64")),
        "length": datasets.Value("int64"),
        "reason": datasets.Value("string"),
    }
)

# For base models, which ship no template: the course's plain format. It needs no new token.
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '### Instruction:\n' + message['content'] + '\n\n' }}
{%- elif message['role'] == 'assistant' -%}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}
{%- else -%}{{ message['content'] + '\n\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Response:\n' }}{%- endif -%}"""


@dataclass
class Tokenised:
    """Rows ready for the trainer and an account of every row read."""

    rows: datasets.Dataset  # columns input_ids and labels, lists of int of equal length
    read: int
    dropped: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0

    def account(self) -> dict[str, Any]:
        """The counts, for the record."""
        return {key: value for key, value in vars(self).items() if key != "rows"} | {"used": len(self.rows)}


def set_default_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give a tokenizer without chat template the default one; returns whether it had none."""
    if tokenizer.chat_template is not None:
        return False
    starts_with_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if starts_with_bos else "") + DEFAULT_TEMPLATE
    return True


def tokenise(
    raw: datasets.Dataset,
    shape: Callable[[Row], Row],
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    max_length: int,
    completion_only: bool,
    name: str,
) -> Tokenised:
    """Turn every row into ids and labels, leaving out and counting the rows that cannot be used.

    Raises:
        Refusal: no row is left.
    """

    def one(row: Row) -> Row:
        try:
            ids, labels = encode(shape(row), tokenizer, stop_ids, completion_only)
        except UnusableRow as error:
            return {"input_ids": [], "labels": [], "length": 0, "reason": str(error)}
        kept = labels[:max_length]
        reason = "" if any(label != IGNORED for label in kept) else f"answer begins after {max_length} tokens"
        return {"input_ids": ids[:max_length], "labels": kept, "length": len(ids), "reason": reason}

    # The map's cache is keyed by the function's name, not by what it calls, and would outlive a change of the code.
    datasets.disable_caching()
    rows = raw.map(one, remove_columns=raw.column_names, features=COLUMNS, desc=f"tokenising {name} rows")
    usable = [index for index, reason in enumerate(rows["reason"]) if not reason]
    dropped = Counter(reason for reason in rows["reason"] if reason)
    if not usable:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in dropped.items()) or "the dataset is empty"
        raise Refusal(
            f"none of the {len(raw)} {name} rows can be used: {reasons}",
            "raise MAX_LENGTH where answers begin too late; else give every row a question and an answer",
        )
    rows = rows.select(usable)
    done = Tokenised(rows.select_columns(["input_ids", "labels"]), len(raw), dict(dropped))
    for length, labels in zip(rows["length"], rows["labels"], strict=True):
        done.cut += length > max_length
        done.longest = max(done.longest, length)
        done.tokens += len(labels)
        done.supervised += sum(label != IGNORED for label in labels)
    _report(done, max_length, name)
    return done


def _report(done: Tokenised, max_length: int, name: str) -> None:
    say(
        f"{name} rows: {len(done.rows):,} of {done.read:,} used, {done.tokens:,} tokens, "
        f"{done.supervised:,} learned, longest row {done.longest:,}"
    )
    if done.dropped:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in done.dropped.items())
        warn(f"{name} rows: dropped {done.read - len(done.rows):,} of {done.read:,}: {reasons}")
    if done.cut:
        warn(f"{name} rows: {done.cut:,} are longer than MAX_LENGTH={max_length} and lose their end")


def encode(
    row: Row, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], completion_only: bool
) -> tuple[list[int], list[int]]:
    """Token ids of one shaped row and the label of each: the id itself where it is learned, else IGNORED."""
    if "messages" in row:
        ids, spans = _encode_chat(row["messages"], tokenizer, stop_ids)
    elif "prompt" in row:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        if ids[: len(prompt)] != prompt:
            # A token spans the border: the model must learn from the prompt's own tokens, which is what it will be given.
            ids = prompt + tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        spans = [(len(prompt), len(ids))]
    else:
        ids = tokenizer(row["text"])["input_ids"]
        spans = [(0, len(ids))]

    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    ids, labels = ids[:end], labels[:end]  # what a template prints after the last answer teaches nothing
    if ids[-1] not in stop_ids:
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    if not completion_only:
        labels = list(ids)
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids, labels = ids[1:], labels[1:]
    return ids, labels


def _encode_chat(
    messages: list[Row], tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a chat and the span of each assistant turn, found by rendering the chat up to it.

    A turn's span ends behind the token that stops generation. A turn in mid-chat is not compared with the same turn
    at the end: templates of reasoning models print the two differently.
    """

    def render(turns: list[Row], prompt: bool = False) -> list[int]:
        try:
            rendered: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, return_dict=True)
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it ({error})") from error
        return rendered["input_ids"]

    ids = render(messages)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = common_prefix_length(render(messages[:index], prompt=True), ids)
        stops = [at + 1 for at in range(start, len(ids)) if ids[at] in stop_ids]
        if stops:
            end = stops[-1] if index == len(messages) - 1 else stops[0]
        else:
            end = common_prefix_length(render(messages[: index + 1]), ids)
        if end <= start or (spans and start < spans[-1][1]):
            raise UnusableRow("the chat template prints an answer differently in mid-chat")
        spans.append((start, end))
    return ids, spans
