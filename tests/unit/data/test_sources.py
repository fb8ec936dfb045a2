"""Every kind of file gives the same rows, in order, in chunks; what is broken is named with file and line."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.data import DataOptions, sources
from relax.data.json_stream import ArrayReader
from relax.data.scan import scan_file
from relax.data.sources import read_chunks
from relax.errors import UserError
from tests.unit.data.samples import chat_row, write_jsonl

ROWS = [chat_row(f"Question {i}", f"Yes {i}", f"No {i}") for i in range(7)]


def rows_of(path: Path) -> list[Any]:
    return [row for chunk in read_chunks(path, file=0) for row in chunk.rows()]


def numbers_of(path: Path) -> list[int]:
    return [number for chunk in read_chunks(path, file=0) for number in chunk.numbers]


def write_csv(path: Path, rows: list[Any]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: v if isinstance(v, str) else json.dumps(v, indent=1) for k, v in row.items()} for row in rows)


def write_arrow(path: Path, rows: list[Any], *, stream: bool) -> None:
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK_ROWS", 3)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "lines.json", ROWS)
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=2))
    write_csv(tmp_path / "a.csv", ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    write_arrow(tmp_path / "file.arrow", ROWS, stream=False)
    write_arrow(tmp_path / "stream.arrow", ROWS, stream=True)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    names = ["a.jsonl", "lines.json", "array.json", "a.csv", "a.parquet", "file.arrow", "stream.arrow", "saved"]
    for name in names:
        rows = rows_of(tmp_path / name)
        if name == "a.csv":  # its cells are text, which whoever reads the row takes for what it is
            rows = [{column: json.loads(cell) for column, cell in row.items()} for row in rows]
        assert rows == ROWS, name
        assert max(len(chunk.numbers) for chunk in read_chunks(tmp_path / name, file=0)) == 3, name
    for name in ("a.jsonl", "a.parquet", "saved"):
        assert numbers_of(tmp_path / name) == [1, 2, 3, 4, 5, 6, 7]


def test_a_chunk_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 300)
    chunks = list(read_chunks(path, file=0))
    assert len(chunks) > 1
    assert [row for chunk in chunks for row in chunk.rows()] == ROWS


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(row).encode() for row in ROWS[:2]) + b"\n")
    assert rows_of(path) == ROWS[:2]
    assert numbers_of(path) == [1, 3]


def test_csv_cells_are_text_or_nothing(tmp_path: Path):
    write_csv(tmp_path / "a.csv", [{"prompt": "46", "chosen": '["a"]', "rejected": "{x", "margin": ""}])
    assert rows_of(tmp_path / "a.csv") == [{"prompt": "46", "chosen": '["a"]', "rejected": "{x", "margin": None}]


LINE = json.dumps(ROWS[0]).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", LINE + b"\n\n{broken\n", r"bad\.jsonl:3: not valid JSON: Expecting property name .* at character 2"),
        ("deep.jsonl", b"[" * 100_000 + b"\n", r"deep\.jsonl:1: not usable JSON: nested more than 100 levels deep"),
        ("just.jsonl", b"[" * 101 + b"]" * 101 + b"\n", r"just\.jsonl:1: not usable JSON: nested more than 100 levels deep"),
        ("digits.jsonl", LINE + b'\n{"a": ' + b"9" * 5000 + b"}", r"digits\.jsonl:2: not usable JSON: .* \(4300 digits\)"),
        (
            "deep.json",
            b"[" + LINE + b",\n" + b"[" * 100_000,
            r"deep\.json:2: not usable JSON: nested more than 100 levels deep",
        ),
        ("just.json", b"[" * 102 + b"]" * 102, r"just\.json:1: not usable JSON: nested more than 100 levels deep"),
        ("digits.json", b"[" + LINE + b",\n" + b"9" * 5000 + b"]", r"digits\.json:2: not usable JSON: .* \(4300 digits\)"),
        ("latin.jsonl", LINE + b'\n{"chosen": "\xe9"}\n', r"latin\.jsonl:2: not UTF-8 text"),
        ("empty.jsonl", b"\n", r"empty\.jsonl: the file holds no rows"),
        ("bad.json", b"[" + LINE + b",\n\n{broken}]", r"bad\.json:3: not valid JSON: .* in the element that begins here"),
        (
            "object.json",
            b'{\n  "data": [' + LINE + b"]\n}",
            r"object\.json:1: a \.json file holds an array .* list alone",
        ),
        ("list.json", b'\n{"version": 1,\n "data": []}', r"list\.json:2: a \.json file holds an array of rows"),
        ("opened.json", b'{"data": [\n' + LINE + b"]}", r"opened\.json:1: a \.json file holds an array of rows"),
        ("lines.json", b"{broken}\n" + LINE, r"lines\.json:1: not valid JSON: Expecting property name"),
        ("cut.json", b"[" + LINE + b",", r"cut\.json:1: not valid JSON"),
        ("latin.json", b"[" + LINE + b', "\xe9"]', r"latin\.json: not UTF-8 text"),
        ("bad.csv", b"prompt,chosen,rejected\na,b,c\na,b\n", r"bad\.csv:3: the row has other columns"),
        ("quote.csv", b'prompt,chosen,rejected\na,"b"x,c\n', r"quote\.csv:2: not valid CSV"),
        ("bad.parquet", b"nothing like it", r"bad\.parquet: cannot be read"),
        ("bad.arrow", b"nothing like it", r"bad\.arrow: cannot be read"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        scan_file(tmp_path / name, options=DataOptions())


def test_a_column_whose_name_is_no_text_is_an_error(tmp_path: Path):
    write_arrow(tmp_path / "a.arrow", [{**row, "longname": 1} for row in ROWS], stream=True)
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content.replace(b"longname", b"long\xffame"))
    with pytest.raises(UserError, match=r"a\.arrow: not UTF-8 text"):
        scan_file(tmp_path / "a.arrow", options=DataOptions())


def test_a_broken_saved_dataset_is_an_error(tmp_path: Path):
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    with pytest.raises(UserError, match="saved: the saved dataset cannot be read"):
        rows_of(tmp_path / "saved")


def test_an_unreadable_file_is_an_error(tmp_path: Path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="cannot be read"):
        rows_of(tmp_path / "a.jsonl")


def test_scan_sees_columns_of_late_rows(tmp_path: Path):
    rows = [*(chat_row(f"Q{i}", "A", "B") for i in range(300)), chat_row("Q", "A", "B", margin=1.0)]
    scan = scan_file(write_jsonl(tmp_path / "a.jsonl", rows), options=DataOptions())
    assert scan.num_rows == 301
    assert scan.columns.names["margin"] == "margin"


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_array_reader_gives_elements_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr("relax.data.json_stream.BLOCK_CHARS", block)
    path = tmp_path / "a.json"
    path.write_text('[\n {"a": "x\\ny"},\n 12345, "é",\n\n [1, [2]]\n]\n')
    with path.open() as stream:
        assert list(ArrayReader(stream, name="a.json")) == [(2, {"a": "x\ny"}), (3, 12345), (3, "é"), (5, [1, [2]])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", r"a\.json:1: not valid JSON: ']' expected"),
        ("[1\n2]", r"a\.json:2: not valid JSON: ']' expected"),
        ("[1] x", "text after the end"),
        ("[,]", "Expecting value"),
        ("{}", r"'\[' expected"),
    ],
)
def test_array_reader_refuses_what_is_no_array(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.json").write_text(text)
    with (tmp_path / "a.json").open() as stream, pytest.raises(UserError, match=message):
        list(ArrayReader(stream, name="a.json"))


def test_array_reader_takes_an_empty_array(tmp_path: Path):
    (tmp_path / "a.json").write_text(" [ ] ")
    with (tmp_path / "a.json").open() as stream:
        assert list(ArrayReader(stream, name="a.json")) == []
