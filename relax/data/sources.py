"""Files -> chunks of raw rows, in order, in bounded memory.

JSONL, JSON (an array, or lines), CSV, each also compressed, Parquet, Arrow, and a `datasets` directory saved to disk.
JSON lines stay bytes and tables stay record batches, so that workers do the parsing. A reader for another kind of file
is one function and one line in `READERS`.

Invariants: a file's chunks hold its rows once and in order, whatever the chunk size; a broken line, and one too long for
memory, is a `UserError` that names file and line; row numbers are line numbers where the file has lines, else row
numbers, from 1.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax.data.compressed import COMPRESSIONS, open_bytes
from relax.data.json_stream import ArrayReader
from relax.data.prefix import is_prefix, prefix_files
from relax.errors import UserError

CHUNK_ROWS = 256
CHUNK_BYTES = 4 << 20
MAX_LINE = 256 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one file as they were read: JSON lines, parsed rows, or a record batch. `numbers` [rows] count from 1."""

    file: int
    numbers: Sequence[int]
    payload: list[bytes] | list[Any] | pa.RecordBatch

    def rows(self) -> list[Any]:
        """The rows, parsed. Lines were checked by `scan` before, so that parsing them cannot fail."""
        if isinstance(self.payload, pa.RecordBatch):
            return self.payload.to_pylist()
        return [json.loads(row) if isinstance(row, bytes) else row for row in self.payload]


def is_saved_dataset(path: Path) -> bool:
    """A directory written by `datasets` `save_to_disk`."""
    return (path / "dataset_dict.json").exists() or all((path / name).exists() for name in ("state.json", "dataset_info.json"))


def data_kind(path: Path) -> str:
    """The suffix that says how a file is read, without its compression's (`.jsonl` of `a.jsonl.gz`); "" for no data file."""
    if path.suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix
        return inner if inner in COMPRESSED_KINDS else ""
    return path.suffix if path.suffix in READERS else ""


def data_files(path: Path) -> list[Path]:
    """The files whose bytes make up a source: the path itself, a prefix's files, or everything in a saved dataset."""
    if is_prefix(path):
        return prefix_files(path)
    return sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]


def read_chunks(path: Path, *, file: int) -> Iterator[Chunk]:
    """The file's rows in chunks. Raises `UserError` for what cannot be read."""
    reader = _saved_dataset if path.is_dir() else READERS[data_kind(path)]
    try:
        yield from _pack(reader(path), file=file)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


# What a reader yields: (row number, row), or a whole record batch with the number of its first row.
Item = tuple[int, bytes | Any]


def _pack(items: Iterator[Item], *, file: int) -> Iterator[Chunk]:
    numbers: list[int] = []
    rows: list[Any] = []
    size = 0
    for number, item in items:
        if isinstance(item, pa.RecordBatch):
            yield Chunk(file, range(number, number + item.num_rows), item)
            continue
        numbers.append(number)
        rows.append(item)
        size += len(item) if isinstance(item, bytes) else 0
        if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(file, numbers, rows)
            numbers, rows, size = [], [], 0
    if rows:
        yield Chunk(file, numbers, rows)


def _json_lines(path: Path) -> Iterator[Item]:
    with open_bytes(path) as stream:
        for number, line in enumerate(iter(partial(stream.readline, MAX_LINE), b""), start=1):
            if len(line) == MAX_LINE:
                raise UserError(f"{path}:{number}: the line is longer than {MAX_LINE:,} bytes, which no row is.")
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json(path: Path) -> Iterator[Item]:
    with open_bytes(path) as stream:
        is_array = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if not is_array:
        lines = _json_lines(path)
        for number, line in lines:
            if _goes_on_behind(line):
                raise UserError(
                    f"{path}:{number}: a .json file holds an array of rows, [{{...}}, ...], or one object on each line; "
                    "here one object spans lines. If the rows are a list inside it, save that list alone."
                )
            yield number, line
            break
        yield from lines
        return
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as text:
        yield from ArrayReader(text, name=str(path))


def _goes_on_behind(line: bytes) -> bool:
    """Whether a JSON value begins on this line and ends on a later one."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip()) - 1
    except (ValueError, RecursionError):
        pass
    return False


def _csv(path: Path) -> Iterator[Item]:
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: the row has other columns than the header.")
                yield reader.line_num, {name: value or None for name, value in row.items()}
        except csv.Error as error:
            raise UserError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from None


def _parquet(path: Path) -> Iterator[Item]:
    with pq.ParquetFile(path) as file:
        yield from _batches(file.iter_batches(batch_size=CHUNK_ROWS))


def _arrow(path: Path) -> Iterator[Item]:
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield from _batches(reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from _batches(pa.ipc.open_stream(source))


def _saved_dataset(path: Path) -> Iterator[Item]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: the saved dataset cannot be read: {error}") from None
    if isinstance(dataset, DatasetDict):
        splits = ", ".join(f"{path}/{name}" for name in dataset)
        raise UserError(f"{path}: this saved dataset holds several splits; name one: {splits}.")
    tables = dataset.with_format("arrow").iter(batch_size=CHUNK_ROWS)
    yield from _batches(batch for table in tables for batch in table.combine_chunks().to_batches())


def _batches(batches: Iterator[pa.RecordBatch]) -> Iterator[Item]:
    """Record batches cut to at most CHUNK_ROWS rows, each with the number of its first row."""
    number = 1
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts a file's offsets: without this a flipped bit ends the process
        batch.slice(0, 1).to_pylist()  # which fails for names that are no UTF-8
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            piece = batch.slice(start, CHUNK_ROWS)
            yield number, piece
            number += piece.num_rows


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
COMPRESSED_KINDS = (".jsonl", ".json", ".csv")
KINDS = f"{', '.join(READERS)}, and {', '.join(COMPRESSED_KINDS)} with {', '.join(COMPRESSIONS)} behind it"
