"""Directories and compressed files: what is read, what is told, what is refused."""

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from relax.data import DataOptions, compressed, sources
from relax.data.directories import expand_paths, left_out, split_of
from relax.data.scan import scan_file
from relax.data.sources import read_chunks
from relax.errors import UserError
from tests.unit.data.samples import build_tokenizer, chat_row, load, write_jsonl
from tests.unit.data.test_sources import ROWS, rows_of, write_csv


def test_directories_and_several_paths_expand_in_order(tmp_path: Path):
    (tmp_path / "many").mkdir()
    for name in ("b.jsonl", "a.json"):
        write_jsonl(tmp_path / "many" / name, ROWS)
    (tmp_path / "many" / "README.md").write_text("not data")
    write_jsonl(tmp_path / "one.jsonl", ROWS)
    found = expand_paths([str(tmp_path / "one.jsonl"), str(tmp_path / "many")])
    assert [path.name for path in found] == ["one.jsonl", "a.json", "b.jsonl"]


def test_paths_that_cannot_serve_are_errors(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "splits")
    cases = {
        "missing.jsonl": "missing.jsonl: no such file or directory",
        "empty": "the directory holds no data file",
        "notes.txt": r"unknown kind of data file '\.txt'; known: \.jsonl, \.json, \.csv, \.parquet, \.arrow, and "
        r"\.jsonl, \.json, \.csv with \.gz, \.bz2, \.zst behind it",
        "x" * 5000: r"x{100}: cannot be read: File name too long \(data path\)",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            expand_paths([str(tmp_path / name)])
    with pytest.raises(UserError, match="No data file was given"):
        expand_paths([])
    with pytest.raises(UserError, match="holds several splits; name one: .*splits/train"):
        rows_of(tmp_path / "splits")


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_gives_the_same_rows(tmp_path: Path, suffix: str):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    write_csv(tmp_path / "a.csv", ROWS)
    for name in ("a.jsonl", "a.json", "a.csv"):
        packed = tmp_path / f"{name}{suffix}"
        packed.write_bytes(COMPRESS[suffix]((tmp_path / name).read_bytes()))
        assert rows_of(packed) == rows_of(tmp_path / name) and len(rows_of(packed)) == len(ROWS)
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / f"b.jsonl{suffix}").write_bytes(b"".join(map(COMPRESS[suffix], lines)))  # as `cat a.gz b.gz` writes it
    assert rows_of(tmp_path / f"b.jsonl{suffix}") == ROWS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_or_foreign_compressed_file_is_an_error(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = COMPRESS[suffix](b"".join(json.dumps(chat_row(f"Q{i}", f"A{i}", f"B{i}")).encode() + b"\n" for i in range(500)))
    for content in (whole[: len(whole) // 2], b'{"chosen": "A", "rejected": "B"}\n'):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"a\.jsonl\{suffix}: cannot be read: "):
            scan_file(path, options=DataOptions())


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.bz2", "bomb.csv.zst"])
def test_a_bomb_is_stopped_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(compressed, "ALWAYS_FINE", 1 << 20)
    content = b"[" + b" " * (8 << 20)
    (tmp_path / name).write_bytes(COMPRESS[Path(name).suffix](content))
    with pytest.raises(UserError, match=rf"{name}: expands to more than [0-9,]+ bytes, over 200 times its size"):
        scan_file(tmp_path / name, options=DataOptions())
    monkeypatch.setattr(compressed, "ALWAYS_FINE", 16 << 20)  # what is small is fine, whatever its ratio
    with pytest.raises(UserError, match="not valid|holds no rows"):
        scan_file(tmp_path / name, options=DataOptions())


def test_a_line_that_would_fill_memory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], chat_row("Q", "x" * 5000, "y")])
    monkeypatch.setattr(sources, "MAX_LINE", 2000)
    with pytest.raises(UserError, match=r"a\.jsonl:2: the line is longer than 2,000 bytes"):
        list(read_chunks(path, file=0))


def test_a_directory_is_read_with_its_compressed_files_and_names_what_it_leaves_out(tmp_path: Path):
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "images").mkdir()
    (data / ".cache").mkdir()
    write_jsonl(data / "helpful.jsonl", ROWS[:3])
    (data / "harmless.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS[3:]).encode()))
    write_jsonl(data / "more" / "c.jsonl", ROWS)
    write_jsonl(data / ".cache" / "d.jsonl", ROWS)
    (data / "images" / "picture.png").write_bytes(b"png")
    for name in ("dataset_infos.json", "state.json", "README.md", ".gitattributes", "LICENSE", "load.py", "manifest.json"):
        (data / name).write_text("{}")
    (data / "old.parquet.gz").write_bytes(b"")
    (data / "notes.txt").write_text("not data")
    (data / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert [path.name for path in expand_paths([str(data)])] == ["harmless.jsonl.gz", "helpful.jsonl"]
    assert left_out([str(data)]) == (f"{data}: left out, not read: gone.jsonl, more/, notes.txt, old.parquet.gz",)
    assert left_out([str(data / "helpful.jsonl"), str(data / "more")]) == ()

    dataset = load(data, build_tokenizer(tmp_path / "tokenizer"), cache=tmp_path / "cache")
    assert len(dataset) == len(ROWS)
    assert "left out, not read: gone.jsonl, more/, notes.txt, old.parquet.gz" in dataset.report.table()
    (data / "notes.txt").unlink()
    again = load(data, build_tokenizer(tmp_path / "tokenizer"), cache=tmp_path / "cache")  # told of what is there now
    assert again.report.to_json()["notes"] == [f"{data}: left out, not read: gone.jsonl, more/, old.parquet.gz"]


def test_a_directory_without_data_names_what_it_holds(tmp_path: Path):
    (tmp_path / "hub" / "data").mkdir(parents=True)
    write_jsonl(tmp_path / "hub" / "data" / "a.jsonl", ROWS)
    (tmp_path / "hub" / "README.md").write_text("card")
    with pytest.raises(UserError, match=r"hub: the directory holds no data file \(.*\) and no saved dataset. There are: data/"):
        expand_paths([str(tmp_path / "hub")])


def test_several_splits_in_one_directory_are_an_error_with_the_way_out(tmp_path: Path):
    for name in ("train.jsonl", "test.jsonl", "extra.jsonl"):
        write_jsonl(tmp_path / name, ROWS)
    with pytest.raises(UserError) as caught:
        expand_paths([str(tmp_path)])
    assert str(caught.value) == (
        f"{tmp_path}: the directory holds several splits (test: test.jsonl; train: train.jsonl), and all of it would be read "
        f"as one set. Name the files of one split instead, such as {tmp_path}/train.jsonl."
    )
    assert len(expand_paths([str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")])) == 2  # named is meant
    (tmp_path / "test.jsonl").unlink()
    assert [path.name for path in expand_paths([str(tmp_path)])] == ["extra.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("test_prefs-00000-of-00001.parquet", "test"),
        ("ultrafeedback_eval.jsonl", "test"),
        ("Dev.csv", "validation"),
        ("helpful-base.val.jsonl.gz", "validation"),
        ("latest.jsonl", None),
        ("constraints.jsonl", None),
        ("trainer.jsonl", None),
    ],
)
def test_a_split_is_known_by_a_whole_word_of_the_name(name: str, split: str | None):
    assert split_of(name) == split
