"""What files of rows the fuzzers write: nearly right, so that they get far, and seldom not at all."""

import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume
from hypothesis import strategies as st

from tests.fuzzing import seldom

Draw = Callable[..., Any]

WORDS = ["Add.", "3", "A plum.", "", " ", "None", "\ud800", "\x1b[31mred\x1b[0m", "\0", "\x85\u2028", "\u202eé"]
WORDS += [
    "<|end|>",
    "<|start|>assistant\n",
    "{{ 7 }}",
    "2024-01-02",
    "9" * 400,
    "@deep@",
    "@huge@",
    "@nan@",
    "x" * 3000,
]
COLUMNS = ["messages", "conversations", "prompt", "completion", "instruction", "input", "output"]
COLUMNS += ["question", "answer", "text"]
COLUMNS += ["system", "tools", "chosen", "Text", "", "id", "\x1b[31m", "\ud800", "role", "content", "__index_level_0__"]
words = st.one_of(st.sampled_from(WORDS[:3]), st.sampled_from(WORDS), st.text(max_size=10))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), words)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(COLUMNS), inner, max_size=3)),
    max_leaves=5,
)
said = seldom(words, junk)
roles = seldom(
    st.sampled_from(["user", "assistant", "system", "human", "gpt"]),
    st.one_of(st.sampled_from(["tool", "developer", "function", "Plum", "\x1b[31m"]), junk),
)
parts = st.lists(
    seldom(st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": said}), junk), max_size=2
)
calls = st.lists(
    seldom(
        st.fixed_dictionaries(
            {"type": st.just("function"), "function": st.fixed_dictionaries({"name": said, "arguments": junk})}
        ),
        junk,
    ),
    max_size=2,
)
contents = seldom(said, parts, of=4)
turn = st.one_of(
    st.fixed_dictionaries({"role": roles, "content": contents}),
    st.fixed_dictionaries(
        {"role": roles, "content": contents}, optional={"tool_calls": calls, "name": said, "thinking": said}
    ),
    st.fixed_dictionaries({"from": roles, "value": contents}, optional={"weight": junk}),
)
chat = st.lists(seldom(turn, junk), max_size=4)
mild = seldom(words, junk, of=6)
SHAPES = [
    st.fixed_dictionaries({"messages": seldom(chat, junk)}, optional={"tools": seldom(calls, junk), "system": said}),
    st.fixed_dictionaries({"conversations": chat}, optional={"system": said, "id": junk}),
    st.fixed_dictionaries({"prompt": mild, "completion": mild}),
    st.fixed_dictionaries({"prompt": chat, "completion": seldom(chat, words)}),
    st.fixed_dictionaries({"instruction": mild, "output": mild}, optional={"input": said, "system": said}),
    st.fixed_dictionaries({"question": mild, "answer": mild}, optional={"context": said}),
    st.fixed_dictionaries({"text": mild}, optional={"": junk}),
    st.fixed_dictionaries({"prompt": chat, "chosen": chat, "rejected": chat}),
    st.dictionaries(st.sampled_from(COLUMNS), mild, max_size=4),
]


@st.composite
def some_rows(draw: Draw) -> list[Any]:
    """Rows of one shape, seldom with a key left out, another key, or no row at all in between."""
    rows = draw(st.lists(draw(st.sampled_from(SHAPES)), min_size=draw(seldom(st.just(1), st.just(0))), max_size=4))
    for at in range(len(rows)):
        change = draw(seldom(st.just(""), st.sampled_from(["less", "more", "other"])))
        if change == "less":
            rows[at] = dict(list(rows[at].items())[1:])
        elif change == "more":
            rows[at] = {**rows[at], draw(st.sampled_from(COLUMNS)): draw(junk)}
        elif change:
            rows[at] = draw(junk)
    return list(rows)


@st.composite
def json_files(draw: Draw) -> bytes:
    """Rows as a list or as lines, with what no serialiser writes put in."""
    rows, escaped = draw(st.one_of(some_rows(), some_rows(), st.lists(junk, max_size=3))), draw(st.booleans())
    if draw(st.booleans()):
        text = json.dumps(
            draw(seldom(st.just(rows), st.just({"data": rows}))),
            ensure_ascii=escaped,
            indent=draw(st.sampled_from([None, 1])),
        )
    else:
        ends = st.lists(
            st.sampled_from(["\n", "\n", "\r\n", "\n\n", "\r", ",\n", " "]), min_size=len(rows), max_size=len(rows)
        )
        text = "".join(json.dumps(row, ensure_ascii=escaped) + end for row, end in zip(rows, draw(ends), strict=True))
    depth = draw(st.sampled_from([30, 300, 1500, 30000]))
    for mark, put in (
        ("deep", "[" * depth + "]" * depth),
        ("huge", "9" * draw(st.sampled_from([20, 400, 5000]))),
        ("nan", "-NaN"),
    ):
        text = text.replace(f'"@{mark}@"', put)
    twice = draw(seldom(st.just(""), st.sampled_from(COLUMNS)))
    text = text.replace(f'"{twice}":', f'"{twice}": 1, "{twice}":') if twice else text
    mark = draw(seldom(st.just(b""), st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\n\n", b" "])))
    return bytes(
        mark
        + text.encode(draw(seldom(st.just("utf-8"), st.sampled_from(["utf-16", "utf-8-sig"]), of=20)), "surrogatepass")
    )


@st.composite
def csv_files(draw: Draw) -> bytes:
    """Rows as CSV, seldom ragged; or any text of the characters that matter to CSV."""
    if draw(seldom(st.just(False), st.just(True), of=4)):
        return bytes(draw(st.text(st.sampled_from("text,\";'\t\n\r\0 é"), max_size=60)).encode())
    stream = io.StringIO()
    style = {
        "delimiter": draw(st.sampled_from([",", ",", "\t", ";"])),
        "lineterminator": draw(st.sampled_from(["\n", "\r\n", "\r"])),
    }
    writer = csv.writer(
        stream, quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])), escapechar="\\", **style
    )
    rows = [row for row in draw(some_rows()) if isinstance(row, dict)]
    writer.writerow(draw(seldom(st.just(list(rows[0]) if rows else ["text"]), st.lists(words, max_size=4))))
    for row in rows:
        writer.writerow([*row.values(), *draw(seldom(st.just([]), st.lists(words, max_size=3)))])
    return stream.getvalue().encode(
        draw(seldom(st.just("utf-8"), st.sampled_from(["utf-8-sig", "utf-16"]))), "surrogatepass"
    )


TEMPORAL = [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.timestamp("us", "Plum/Tz")]
TEMPORAL += [pa.date64(), pa.time64("us"), pa.duration("s")]
KINDS = ["text", "text", "dictionary", "binary", "integer", "float", "boolean", "null"]
KINDS += ["temporal", "decimal", "list", "map", "struct"]
PARTS = ["role", "content", "from", "value", "type", "text"]
DECIMALS = [Decimal("1.50"), Decimal(10) ** 30, Decimal(-1), None]


@st.composite
def columns(draw: Draw, size: int, depth: int = 2) -> pa.Array:
    """A column of some Arrow type, nulls and values out of range among it."""

    def listed(values: Any) -> Any:
        return draw(st.lists(st.one_of(st.none(), values), min_size=size, max_size=size))

    kind = draw(st.sampled_from(KINDS))
    plain = words.map(lambda word: word.encode(errors="replace").decode())
    if kind in ("list", "map", "struct") and depth:
        if kind == "struct":
            keys = draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True))
            return pa.StructArray.from_arrays([draw(columns(size, depth - 1)) for _ in keys], names=keys)
        offsets = pa.array(
            [0, *sorted(draw(st.lists(st.integers(0, 2 * size), min_size=size, max_size=size)))], pa.int32()
        )
        inner = draw(columns(2 * size, depth - 1))
        if kind == "list":
            return pa.ListArray.from_arrays(offsets, inner)
        return pa.MapArray.from_arrays(offsets, pa.array([f"k{n}" for n in range(2 * size)]), inner)
    if kind == "temporal":
        return pa.array(listed(st.integers(-(2**63), 2**63 - 1)), pa.int64()).view(draw(st.sampled_from(TEMPORAL)))
    array = {
        "dictionary": lambda: pa.array(listed(plain), pa.string()).dictionary_encode(),
        "binary": lambda: pa.array(
            listed(st.binary(max_size=5)), draw(st.sampled_from([pa.binary(), pa.large_binary()]))
        ),
        "integer": lambda: pa.array(
            listed(st.integers(0, 127)), draw(st.sampled_from([pa.int8(), pa.uint64(), pa.int64()]))
        ),
        "float": lambda: pa.array(listed(st.floats(width=32)), draw(st.sampled_from([pa.float32(), pa.float64()]))),
        "boolean": lambda: pa.array(listed(st.booleans()), pa.bool_()),
        "null": lambda: pa.nulls(size),
        "decimal": lambda: pa.array(listed(st.sampled_from(DECIMALS)), pa.decimal256(50, 2)),
    }.get(kind, lambda: pa.array(listed(plain), draw(st.sampled_from([pa.string(), pa.large_string()]))))
    return array()


@st.composite
def parquet_files(draw: Draw) -> bytes:
    """Tables of known shapes, or of any Arrow types under known names; seldom with junk in the schema's metadata."""
    size = draw(st.integers(0, 4))
    wanted = draw(
        st.one_of(
            st.sampled_from([["text"], ["messages"], ["prompt", "completion"], ["question", "answer"]]),
            st.lists(st.sampled_from(COLUMNS), max_size=4),
        )
    )
    try:
        table = (
            pa.table([draw(columns(size)) for _ in wanted], names=wanted)
            if draw(st.booleans())
            else pa.Table.from_pylist([row for row in draw(some_rows()) if isinstance(row, dict)])
        )
        about = draw(st.sampled_from([b"huggingface", b"pandas", b"ARROW:schema"]))
        table = table.replace_schema_metadata(
            draw(seldom(st.none(), st.just({about: draw(junk.map(json.dumps)).encode(errors="replace")})))
        )
        pq.write_table(table, stream := io.BytesIO(), compression=draw(st.sampled_from(["NONE", "SNAPPY", "ZSTD"])))
    except (pa.ArrowException, UnicodeEncodeError, AttributeError, OverflowError):
        assume(False)  # Parquet cannot hold it
    return stream.getvalue()
