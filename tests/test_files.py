"""Files of every kind to rows: known by content, read as a stream, refused by line."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest

from train import files
from train.console import Refusal

ROWS = [{"q": "a\nb", "n": 1}, {"q": 'é "x" \\', "n": {"deep": [1, None, {}]}}, {"q": "plum " * 9, "n": -2.5e3}]
FORMS = {
    "lines": "\n".join(json.dumps(row) for row in ROWS),
    "blank lines": "\n\n".join(json.dumps(row) for row in ROWS) + "\n\n",
    "windows lines": "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "commas": ",\n".join(json.dumps(row) for row in ROWS),
    "array": json.dumps(ROWS),
    "indented array": json.dumps(ROWS, indent=2),
    "indented objects": "\n".join(json.dumps(row, indent=4) for row in ROWS),
    "with a byte order mark": "\ufeff" + json.dumps(ROWS),
}


def rows_of(file):
    return [row for _, row in files.read(file)]


@pytest.mark.parametrize("chunk", [1, 5, 64, 2**20])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "rows.txt"])
def test_json_is_known_by_its_content_wherever_a_chunk_ends(tmp_path, monkeypatch, name, form, chunk):
    monkeypatch.setattr(files, "CHUNK", chunk)
    (tmp_path / name).write_text(FORMS[form], encoding="utf-8", newline="")
    assert rows_of(tmp_path / name) == ROWS


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
def test_packed_files_are_unpacked_whatever_they_are_called(tmp_path, pack, name):
    whole = pack(FORMS["lines"].encode())
    (tmp_path / name).write_bytes(whole)
    assert rows_of(tmp_path / name) == ROWS
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(Refusal, match=name):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ('{"a": 1}\n{"a": "x\n{"a": 3}\n', 2, '{"a": "x'),
        ('{"a": 1}\n\n{"a": 2\n{"a": 3}\n', 3, '{"a": 2'),
        ('{"a": 1\n{"a": 2}\n', 1, '{"a": 1'),
        ('{"a": 1}\nplum\n', 2, "plum"),
        ('{\n "a": 1,\n "b" 2\n}\n', 3, '"b" 2'),
        ('[\n {"a": 1},\n {"a": 2,,}\n]', 3, '{"a": 2,,}'),
        ('{"x": 1,\n "y": 2}\n{"a": 1,\n "b" 2}\n', 4, '"b" 2'),
        ("plum", 1, "plum"),
        ('{"a": ' + "[" * 99999, 1, "[[["),
        ('{"a": ' + "9" * 9999 + "}", 1, "999"),
    ],
)
def test_broken_json_names_file_and_line_and_shows_its_start(tmp_path, text, line, shown):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(Refusal) as refusal:
        rows_of(tmp_path / "rows.jsonl")
    assert f"rows.jsonl, line {line}: not JSON" in refusal.value.what
    assert shown in refusal.value.what and len(refusal.value.what.splitlines()) == 1
    assert "…" not in refusal.value.what or len(refusal.value.what) < 400


def test_an_array_without_end_is_refused(tmp_path):
    (tmp_path / "rows.json").write_text('[{"a": 1}, {"a": 2}')
    with pytest.raises(Refusal, match="line 1 opens has no end"):
        rows_of(tmp_path / "rows.json")


def test_encodings_are_refused_by_line(tmp_path):
    utf16, latin = tmp_path / "utf16.jsonl", tmp_path / "latin.csv"
    utf16.write_text('{"a": 1}', encoding="utf-16")
    latin.write_bytes(b"q,a\nplum,pl\xfcm\n")
    with pytest.raises(Refusal, match="is UTF-16, save it as UTF-8"):
        rows_of(utf16)
    with pytest.raises(Refusal, match="latin.csv, line 2: is not UTF-8"):
        rows_of(latin)


def test_csv_cells_stay_as_they_are_written(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('q,a\n007,None\n3.10,"b, ""c""\r\nd"\n\n2024-01-02,\n', newline="")
    assert list(files.read(file)) == [
        (2, {"q": "007", "a": "None"}),
        (3, {"q": "3.10", "a": 'b, "c"\nd'}),
        (6, {"q": "2024-01-02", "a": ""}),
    ]


@pytest.mark.parametrize(("name", "separator"), [("rows.csv", ","), ("rows.csv", ";"), ("rows.tsv", "\t")])
def test_the_separator_is_the_headers(tmp_path, name, separator):
    (tmp_path / name).write_text(f"q{separator}a\nplum{separator}x y\n")
    assert rows_of(tmp_path / name) == [{"q": "plum", "a": "x y"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q,a\nb,c\nd,e,f\n", "line 3: expected 2 fields, found 3: d,e,f"),
        ('q,a\n"b\nb",c\nd\n', "line 4: expected 2 fields, found 1"),
        ('q,a\n"b"x,c\n', "line 2: not CSV"),
        ('q,a\n"b,c\n', "not CSV"),
        ("q,q\nb,c\n", "several columns called q"),
    ],
)
def test_broken_csv_names_file_and_line(tmp_path, text, said):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(Refusal) as refusal:
        rows_of(tmp_path / "rows.csv")
    assert f"rows.csv{'' if 'columns' in said else ', '}" in refusal.value.what and said in refusal.value.what


def test_parquet_leaves_out_the_keys_that_only_other_rows_have(tmp_path):
    rows = [{"calls": [{"arguments": {"fruit": "plum"}}]}, {"calls": [{"arguments": {"price": 1.5}}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.bin")
    assert rows_of(tmp_path / "rows.bin") == rows  # known by content here too
    (tmp_path / "rows.parquet").write_bytes((tmp_path / "rows.bin").read_bytes()[:-20])
    with pytest.raises(Refusal, match="rows.parquet cannot be read as Parquet"):
        rows_of(tmp_path / "rows.parquet")


def test_other_kinds_of_files_are_refused_with_those_that_are_read(tmp_path):
    (tmp_path / "rows.docx").write_bytes(b"PK\x03\x04 plum")
    with pytest.raises(Refusal, match="of no known kind") as refusal:
        rows_of(tmp_path / "rows.docx")
    assert ".jsonl" in refusal.value.fix
