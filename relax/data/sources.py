"""Files -> chunks of raw rows, in order, in bounded memory.

JSONL, JSON (an array, or lines), CSV, Parquet, Arrow, a directory of them, and a `datasets` directory saved to disk.
JSON lines stay bytes and tables stay record batches, so that workers do the parsing. A reader for another kind of file
is one function and one line in `READERS`.

Invariants: a file's chunks hold its rows once and in order, whatever the chunk size; a broken line is a `UserError`
that names file and line; row numbers are line numbers where the file has lines, else row numbers, from 1.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax.data.json_stream import ArrayReader
from relax.data.prefix import SIDECAR_SUFFIX, is_prefix, prefix_files
from relax.errors import UserError

CHUNK_ROWS = 256
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one file as they were read: JSON lines, parsed rows, or a record batch. `numbers` [rows] count from 1."""

    file: int
    numbers: Sequence[int]
    payload: list[bytes] | list[Any] | pa.RecordBatch

    def rows(self) -> list[Any]:
        """The rows, parsed. Lines were checked by `scan` before, so that parsing them cannot fail."""
        if isinstance(self.payload, pa.RecordBatch):
            return [without_nulls(row) for row in self.payload.to_pylist()]
        return [json.loads(row) if isinstance(row, bytes) else row for row in self.payload]


def expand_paths(paths: Sequence[str]) -> list[Path]:
    """The data files and tokenized prefixes behind `--prompt-data`, directories expanded in name order. Raises `UserError`."""
    files = [file for path in paths for file in _expand(Path(path))]
    if not files:
        raise UserError("No data file was given.")
    return files


def _expand(path: Path) -> list[Path]:
    if is_prefix(path):
        if path.exists():
            raise UserError(f"{path}: the name of {'a directory' if path.is_dir() else 'a file'} and of a tokenized prefix.")
        prefix_files(path)  # says what is missing
        return [path]
    if not path.exists():
        raise UserError(f"{path}: no such file or directory (data path).")
    if is_saved_dataset(path):
        return [path]
    if not path.is_dir():
        if path.suffix not in READERS:
            raise UserError(f"{path}: unknown kind of data file {path.suffix!r}; known: {', '.join(READERS)}.")
        return [path]
    entries = (entry for entry in path.iterdir() if not entry.name.endswith(SIDECAR_SUFFIX))
    found = sorted(entry for entry in entries if entry.suffix in READERS and entry.is_file())
    if not found:
        raise UserError(f"{path}: the directory holds no data file ({', '.join(READERS)}) and no saved dataset.")
    return found


def is_saved_dataset(path: Path) -> bool:
    """A directory written by `datasets` `save_to_disk`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def data_files(path: Path) -> list[Path]:
    """The files whose bytes make up a source: the path itself, a prefix's files, or everything in a saved dataset."""
    if is_prefix(path):
        return prefix_files(path)
    return sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]


def read_chunks(path: Path, *, file: int) -> Iterator[Chunk]:
    """The file's rows in chunks. Raises `UserError` for what cannot be read."""
    reader = _saved_dataset if path.is_dir() else READERS[path.suffix]
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
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json(path: Path) -> Iterator[Item]:
    with path.open("rb") as stream:
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
    with path.open(encoding="utf-8-sig") as text:
        yield from ArrayReader(text, name=str(path))


def _goes_on_behind(line: bytes) -> bool:
    """Whether a JSON value begins on this line and ends on a later one."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip()) - 1
    except (UnicodeDecodeError, RecursionError):
        pass
    return False


def _csv(path: Path) -> Iterator[Item]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: the row has other columns than the header.")
                yield reader.line_num, {name: _cell(value) for name, value in row.items()}
        except csv.Error as error:
            raise UserError(f"{path}:{reader.reader.line_num}: not valid CSV: {error}") from None


def _cell(text: str) -> Any:
    """A cell as text, unless it is the JSON of messages. An empty cell is no value."""
    if text[:1] in ("[", "{"):
        try:
            value = json.loads(text)
        except ValueError:
            return text
        messages = value if isinstance(value, list) else [value]
        if messages and all(isinstance(entry, dict) and entry.keys() & {"role", "from"} for entry in messages):
            return value
    return text or None


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
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            piece = batch.slice(start, CHUNK_ROWS)
            yield number, piece
            number += piece.num_rows


def without_nulls(value: Any) -> Any:
    """Tables fill the fields that a struct lacks with nulls; templates would read those as given."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


READERS: dict[str, Callable[[Path], Iterator[Item]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
