"""Random dataset files of every kind: read, shaped and tokenised, or refused with the way out."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz_files import COLUMNS, Draw, csv_files, json_files, parquet_files
from tests.fuzzing import Fuzz, examples, seldom

# With --data every row is shaped and tokenised too.
CHECK = ("check", "--data")

SUFFIXES = {"json": [".json", ".jsonl"], "csv": [".csv", ".tsv"], "parquet": [".parquet"]}
WRITTEN = {"json": json_files(), "csv": csv_files(), "parquet": parquet_files()}
STEMS = ["rows", "train", "validation", "test", "data/train-00000-of-00001", ".hidden", "dataset_infos", "[a]*?"]
STEMS += ["a b", "a,b", "é"]
CARDS = ["configs:\n- config_name: x\n  data_files: '*.csv'", "configs: 3", "dataset_info: [", "\x1b"]
CARDS += ["dataset_info:\n  features: 3"]


@st.composite
def corrupted(draw: Draw, whole: Any) -> bytes:
    """A file cut short, with bytes changed, put in or taken out."""
    text = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at, much = draw(st.integers(0, len(text))), draw(st.sampled_from([0, 1, 1, 4, 10000]))
        text[at : at + much] = draw(st.binary(max_size=4))
    return bytes(text)


FILES = {
    **WRITTEN,
    **{f"corrupted {kind}": corrupted(written) for kind, written in WRITTEN.items()},
    "bytes": st.one_of(st.binary(max_size=200), st.text(max_size=40).map(lambda text: text.encode())),
}
odd = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10),
    st.sampled_from(["nan", "-1", "\x1b[31m", "9" * 5000, "'"]),
)
column = st.sampled_from(COLUMNS[:11])
TEMPLATES = ["{instruction}", "{{ instruction }}", "{{ text }}: {{ 7 }}", "{", "{{", "{0.__class__}"]
TEMPLATES += ["{% for x in range(10 ** 9) %}x{% endfor %}"]
NAMES = [".", "..", "/", "/dev/null", "~x/rows", "a,b", ",", "a/b/c", "a//b", "a/b@c", "-", "a" * 300, "a" * 5000]
# Some of these are not there yet: a name that is no setting is nobody's business.
DATA_SETTINGS = {
    "DATASET_SPLIT": st.sampled_from(["train", "train[:1]", "train[-50%:]", "train+test", "train[9:3]", "all", "["]),
    "DATASET_CONFIG": st.sampled_from(["default", "x", "../x"]),
    "DATASET_REVISION": st.sampled_from(["main", "x"]),
    "DATASET_WEIGHTS": st.sampled_from(["1", "1,2", "0.5,0.5", "0,0", "-1", "1e300,1e300", "nan", "1,2,3"]),
    "EVAL_FRACTION": st.sampled_from(["0.5", "0.01", "0.99"]),
    "MAX_LENGTH": st.sampled_from(["8", "9", "100", str(2**31), str(2**64)]),
    "COMPLETION_ONLY_LOSS": st.just("false"),
    "PROMPT_COLUMN": column,
    "COMPLETION_COLUMN": column,
    "SYSTEM_PROMPT": st.sampled_from(["Be kind.", "<|end|>"]),
    "PROMPT_TEMPLATE": st.sampled_from(TEMPLATES),
    "STREAMING": st.just("true"),
    "MAX_ROWS": st.sampled_from(["1", "2", str(2**64)]),
    "DEDUPLICATE": st.just("true"),
    "MAX_DROPPED_FRACTION": st.sampled_from(["0", "0.5", "1"]),
    "LONG_ROWS": st.sampled_from(["cut", "drop"]),
}
chosen = st.one_of(
    st.just({}),
    st.lists(st.sampled_from(list(DATA_SETTINGS)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: seldom(DATA_SETTINGS[name], odd) for name in names})
    ),
)


@pytest.mark.parametrize("kind", FILES)
@examples(30)
@given(data=st.data())
def test_any_file_is_read_or_refused(fuzz: Fuzz, tiny_model: Path, kind, data):
    """One file, a folder of several, or several by name; of the right suffix or another."""
    folder = fuzz.folder() / "given"
    suffixes = SUFFIXES.get(kind.split()[-1], [".jsonl", ".csv", ".parquet"])
    others = [".json", ".JSONL", ".csv", ".tsv", ".parquet", ".txt", ".jsonl.gz", ".zip", ".arrow", ""]
    files = data.draw(
        st.lists(
            st.tuples(
                seldom(st.sampled_from(STEMS[:2]), st.sampled_from(STEMS), of=4),
                seldom(st.sampled_from(suffixes), st.sampled_from(others)),
                FILES[kind],
            ),
            min_size=1,
            max_size=data.draw(st.sampled_from([1, 1, 3])),
        )
    )
    for stem, suffix, content in files:
        path = folder / (stem + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    paths = [str(folder / (stem + suffix)) for stem, suffix, _ in files]
    dataset = data.draw(st.sampled_from([paths[0], str(folder), ",".join(paths)]))
    if dataset == str(folder) and (card := data.draw(seldom(st.none(), st.sampled_from(CARDS)))):
        (folder / "README.md").write_text(f"---\n{card}\n---\n")
    settings = data.draw(chosen)
    if data.draw(seldom(st.just(False), st.just(True))):
        settings = {**settings, "EVAL_DATASET": dataset}
    fuzz(*CHECK, MODEL_ID=str(tiny_model), ALLOW_CPU="true", DATASET=dataset, **settings)


@examples(40)
@given(name=odd | st.sampled_from(NAMES))
def test_any_name_of_a_dataset_is_taken_or_refused(fuzz: Fuzz, tiny_model: Path, name):
    fuzz.folder()
    fuzz(*CHECK, MODEL_ID=str(tiny_model), ALLOW_CPU="true", DATASET=name)
