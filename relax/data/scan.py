"""The first pass over a file: is every line readable, how many rows, which columns, which format.

It runs before anything is tokenized, so that a broken line in the last megabyte is reported in seconds.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from relax.data.columns import INFORMATION, Columns, resolve_columns
from relax.data.formats import FORMAT_PARTS, choose_format
from relax.data.options import DataOptions
from relax.data.sources import Chunk, read_chunks
from relax.errors import UserError

# Rows from which the format and the columns are taken.
SAMPLE_ROWS = 256


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

    def consumed_columns(self, *, tools: bool, margins: bool) -> frozenset[str]:
        """Columns that something reads, and those that only inform people; `tools`, `margins`: template, loss read them."""
        consumed = self.columns.consumed(FORMAT_PARTS[self.format]) | INFORMATION
        unread = [part for part, read in (("tools", tools), ("margin", margins)) if not read]
        return consumed - {self.columns.names.get(part) for part in unread}


def scan_file(path: Path, *, options: DataOptions) -> FileScan:
    """Read the file once. Raises `UserError` for a broken line (file and line), no rows, or no known format."""
    num_rows = 0
    names: set[str] = set()
    sample: list[object] = []
    for chunk in read_chunks(path, file=0):
        rows = _check_rows(chunk, path=path)
        names.update(*(row for row in rows if isinstance(row, dict)))
        num_rows += len(chunk.numbers)
        sample += rows[: SAMPLE_ROWS - len(sample)]
    if not num_rows:
        raise UserError(f"{path}: the file holds no rows.")
    columns = resolve_columns(names, options=options, path=str(path))
    name = choose_format(sample, columns=columns, path=str(path), allowed=options.row_formats)
    return FileScan(name, columns, num_rows, path=str(path))


def _check_rows(chunk: Chunk, *, path: Path) -> list[object]:
    """The chunk's rows; of a table's later batches, whose cells need no check, only the column names."""
    if isinstance(chunk.payload, pa.RecordBatch):
        return chunk.rows() if chunk.numbers[0] <= SAMPLE_ROWS else [dict.fromkeys(chunk.payload.schema.names)]
    rows: list[object] = []
    for number, row in zip(chunk.numbers, chunk.payload, strict=True):
        try:
            rows.append(json.loads(row) if isinstance(row, bytes) else row)
        except UnicodeDecodeError:
            raise UserError(f"{path}:{number}: not UTF-8 text.") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not valid JSON: {error.msg} at character {error.pos + 1}.") from None
        except RecursionError:
            raise UserError(f"{path}:{number}: not usable JSON: nested too deeply.") from None
    return rows
