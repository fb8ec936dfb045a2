"""The first pass over a file: is every line readable, how many rows, which columns, which format.

It runs before anything is tokenized, so that a broken line in the last megabyte is reported in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from relax.data.columns import Columns, resolve_columns
from relax.data.detection import choose_format
from relax.data.json_stream import load_json
from relax.data.options import DataOptions
from relax.data.sources import Chunk, read_chunks
from relax.errors import UserError

SAMPLE_ROWS = 512  # at most this many rows, spread over the file, decide its format


@dataclass(frozen=True, slots=True)
class FileScan:
    """What a file is: its row format, its columns, its row count; `tokenized`: a prefix, whose rows are token ids.

    `path` names a file of rows in messages.
    """

    format: str
    columns: Columns
    num_rows: int
    tokenized: bool = False
    path: str = ""


def scan_file(path: Path, *, options: DataOptions) -> FileScan:
    """Read the file once. Raises `UserError` for a broken line (file and line), no rows, or no known format."""
    num_rows = 0
    names: set[str] = set()
    sample = Sample()
    for chunk in read_chunks(path, file=0):
        if isinstance(chunk.payload, pa.RecordBatch):  # its cells need no check
            names.update(chunk.payload.schema.names)
            sample.offer(num_rows, len(chunk.numbers), partial(_row_of, chunk.payload))
        else:
            rows = _check_rows(chunk, path=path)
            names.update(*(row for row in rows if isinstance(row, dict)))
            sample.offer(num_rows, len(rows), rows.__getitem__)
        num_rows += len(chunk.numbers)
    if not num_rows:
        raise UserError(f"{path}: the file holds no rows.")
    columns = resolve_columns(names, options=options, path=str(path))
    name = choose_format(sample.rows, columns=columns, path=str(path), allowed=options.row_formats)
    return FileScan(name, columns, num_rows, path=str(path))


class Sample:
    """Rows spread evenly over a file whose length shows only at its end: every k-th, k doubled when they are too many."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._step = 1

    def offer(self, first: int, count: int, get: Callable[[int], Any]) -> None:
        """The next `count` rows of the file, the first of which is its row `first`, from 0; `get(place)` is one of them."""
        self.rows += [get(place) for place in range(-first % self._step, count, self._step)]
        while len(self.rows) > SAMPLE_ROWS:
            self.rows = self.rows[::2]
            self._step *= 2


def _row_of(batch: pa.RecordBatch, place: int) -> Any:
    return batch.slice(place, 1).to_pylist()[0]


def _check_rows(chunk: Chunk, *, path: Path) -> list[Any]:
    """The rows of a chunk of JSON lines or parsed rows."""
    rows: list[Any] = []
    for number, row in zip(chunk.numbers, chunk.payload, strict=True):
        try:
            rows.append(load_json(row) if isinstance(row, bytes) else row)
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}.") from None
    return rows
