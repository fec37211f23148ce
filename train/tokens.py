"""Rows to token ids and labels: what the model reads, what it learns, where it stops, what is cut.

A row ends with a token at which generation stops, and that token is learned, unless MAX_LENGTH cuts the row's end off.
A row starts with one BOS at most.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from train.account import Account
from train.chat import NotRendered, lay_out
from train.console import Refusal
from train.sources import Place
from train.spans import Span
from train.templates import ChatTemplate
from train.turns import Row, UnusableRow

IGNORED = -100  # the label that the loss skips
BATCH = 64  # rows tokenised at a time: the tokenizer spreads them over the cores


@dataclass
class Piece:
    """A row as text, with the spans of it that are learned."""

    text: str
    spans: list[Span]
    prompt: str | None = None  # of a prompt/completion pair
    whole: bool = False  # the text is what it is: the tokenizer adds its special tokens, as it does for a prompt


def lay_out_row(row: Row, template: ChatTemplate, changes: Counter[str], completion_only: bool = True) -> Piece:
    """A shaped row as text.

    Raises:
        UnusableRow: the chat template refuses it.
        NotRendered: the chat template leaves tools out.
    """
    if "messages" in row:
        text, spans = lay_out(template, row, changes, completion_only)
        # What a template prints after the last answer teaches nothing.
        return Piece(text[: spans[-1][1]] if completion_only else text.rstrip(), spans)
    if "prompt" in row:
        text = row["prompt"] + row["completion"]
        return Piece(text, [(len(row["prompt"]), len(text))], row["prompt"], whole=True)
    return Piece(row["text"], [(0, len(row["text"]))], whole=True)


def encode(pieces: list[Piece], template: ChatTemplate, completion_only: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of each piece and the label of each: the id itself where it is learned, else IGNORED."""
    tokenizer = template.tokenizer
    encoded: list[Any] = [None] * len(pieces)
    for whole in (True, False):
        chosen = [at for at, piece in enumerate(pieces) if piece.whole is whole]
        if chosen:
            texts = [pieces[at].text for at in chosen]
            batch = tokenizer(texts, add_special_tokens=whole, return_offsets_mapping=True)
            for at, ids, offsets in zip(chosen, batch["input_ids"], batch["offset_mapping"], strict=True):
                encoded[at] = ids, offsets
    for piece, (ids, offsets) in zip(pieces, encoded, strict=True):
        ends = list(accumulate((end for _, end in offsets), max))  # a token that the tokenizer adds has the offset 0
        labels = [IGNORED] * len(ids)
        for start, end in piece.spans:
            # From the first token that reaches into the span to the last that begins in it.
            first, last = bisect_right(ends, start), bisect_right(ends, end)
            if piece.prompt is not None and first < len(ids) and offsets[first][0] < start:
                parted = _parted(piece.prompt, piece.text[start:], template)
                if tokenizer.decode([*parted[0], *parted[1]], skip_special_tokens=True) == tokenizer.decode(
                    ids, skip_special_tokens=True
                ):
                    ids, first = [*parted[0], *parted[1]], len(parted[0])
                    labels, last = [IGNORED] * len(ids), len(ids)
            labels[first:last] = ids[first:last]
        if piece.whole and not piece.spans[0][0]:
            labels = list(ids)  # plain text is learned with the special tokens around it
        if ids[-1:] == [] or ids[-1] not in template.stop_ids:
            ids, labels = [*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]
        if not completion_only:
            labels = list(ids)
        while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            ids, labels = ids[1:], labels[1:]
        yield ids, labels


def _parted(prompt: str, completion: str, template: ChatTemplate) -> tuple[list[int], list[int]]:
    """The tokens of a prompt as generation will be given it, and those of its completion.

    Where a token would span the border, the model must learn from the prompt's own tokens. Some tokenizers end all that
    they encode, or put a blank before it: the former is taken off here, the latter makes the caller keep the text whole.
    """
    tokenizer = template.tokenizer
    ids = list(tokenizer(prompt)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids, list(tokenizer(completion, add_special_tokens=False)["input_ids"])


def tokenise(
    rows: Iterable[tuple[Place, Row]],
    template: ChatTemplate,
    max_length: int,
    completion_only: bool,
    drop_long: bool,
    account: Account,
) -> Iterator[dict[str, Any]]:
    """Every row that can be used as `input_ids` and `labels` (lists of int of equal length, MAX_LENGTH at most) and
    `length`, its tokens before MAX_LENGTH cut it, and `supervised`, those that are learned. The account counts these and the others.

    Raises:
        Refusal: the chat template leaves out tools or tool calls that rows bring.
    """
    rows = iter(rows)
    while batch := list(islice(rows, BATCH)):
        laid_out: list[tuple[Place, Piece]] = []
        for place, row in batch:
            try:
                changes: Counter[str] = Counter()
                laid_out.append((place, lay_out_row(row, template, changes, completion_only)))
                account.change(changes, place)
            except UnusableRow as error:
                account.drop(str(error), place)
            except NotRendered as error:
                fix = "choose a model whose chat template knows them, or take them out of the rows"
                raise Refusal(f"{place}: {error}", fix) from error
        encoded = encode([piece for _, piece in laid_out], template, completion_only)
        for (place, _), (ids, labels) in zip(laid_out, encoded, strict=True):
            kept = labels[:max_length]
            supervised = len(kept) - kept.count(IGNORED)
            if drop_long and len(ids) > max_length:
                account.leave_out(f"longer than MAX_LENGTH={max_length}", place)
            elif not supervised:
                account.drop(f"the answer begins after MAX_LENGTH={max_length} tokens", place)
                begins = next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
                account.latest_answer = max(account.latest_answer, begins)
            else:
                account.use(len(ids), len(kept), supervised)
                if not account.sample:
                    account.sample = marked(ids[:max_length], kept, template)
                yield {"input_ids": ids[:max_length], "labels": kept, "length": len(ids), "supervised": supervised}


def marked(ids: list[int], labels: list[int], template: ChatTemplate) -> str:
    """A row decoded, with what is learned between ⟦ and ⟧."""
    parts, start = [], 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or (labels[at] == IGNORED) != (labels[start] == IGNORED):
            text = str(template.tokenizer.decode(ids[start:at]))
            parts.append(text if labels[start] == IGNORED else f"⟦{text}⟧")
            start = at
    return "".join(parts)
