"""Megatron's indexed files, one sequence of token ids a row: this module is an `IndexedFormat` of `relax.data.tokenized`.

Strategy: megatron's own builder keeps a number for every row and makes lists of them all at its end. An index begins with
the lengths of its rows, so here they go into the file as they come, and the rest is counted out from there in blocks.

Invariants: the files are, byte for byte, those that megatron's builder writes; memory does not grow with the rows.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, get_bin_path, get_idx_path

from relax.errors import UserError

HEADER = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # header, version, dtype, sequences, documents
_BLOCK = 1 << 16  # rows


class FieldBuilder:
    """Writes one field, int32, each row a document."""

    def __init__(self, path: str) -> None:
        self._rows = 0
        data, index = Path(get_bin_path(path)), Path(get_idx_path(path))
        self._data, self._index = data.open("wb"), index.open("w+b")
        self._write_head()

    def add(self, ids: np.ndarray) -> None:
        """Append one row's sequence."""
        self._data.write(np.ascontiguousarray(ids, "<i4").data)
        self._index.write(struct.pack("<i", len(ids)))
        self._rows += 1

    def finish(self) -> None:
        """Complete the files."""
        self._data.close()
        with self._index:
            self._index.seek(0)
            self._write_head()
            start = 0  # of a sequence in the data, in bytes
            for first in range(0, self._rows, _BLOCK):
                self._index.seek(_HEAD.size + 4 * first)
                lengths = np.frombuffer(self._index.read(4 * min(_BLOCK, self._rows - first)), "<i4")
                ends = start + 4 * np.cumsum(lengths, dtype="<i8")
                self._index.seek(0, os.SEEK_END)
                self._index.write((ends - 4 * lengths).data)
                start = int(ends[-1])
            for first in range(0, self._rows + 1, _BLOCK):  # where documents begin, and the last one's end
                self._index.write(np.arange(first, min(first + _BLOCK, self._rows + 1), dtype="<i8").data)

    def _write_head(self) -> None:
        self._index.write(_HEAD.pack(HEADER, 1, DType.code_from_dtype(np.int32), self._rows, self._rows + 1))


def create_field(path: str) -> FieldBuilder:
    """Begin to write `path`.bin and `path`.idx."""
    return FieldBuilder(path)


def open_field(path: str) -> Sequence[np.ndarray]:
    """The sequences in `path`.bin, memory-mapped. Raises `UserError` for files that are damaged or something else."""
    try:
        with Path(get_idx_path(path)).open("rb") as stream:
            if stream.read(len(HEADER)) != HEADER:  # IndexedDataset would complain twice, once while it is thrown away
                raise ValueError("the .idx file has another header")
        rows = IndexedDataset(path)
        index = rows.index
        size = int(np.sum(index.sequence_lengths, dtype=np.int64)) * index.dtype_size
        if size != Path(get_bin_path(path)).stat().st_size:
            raise ValueError("the .bin file does not have the size that the .idx file says")
    except (AssertionError, KeyError, OSError, TypeError, ValueError, struct.error) as error:
        raise UserError(f"{path}: not Megatron's indexed files, or damaged: {error}") from None
    return rows
