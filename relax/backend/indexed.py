"""Megatron's indexed files, one sequence of token ids a row: this module is an `IndexedFormat` of `relax.data.tokenized`."""

import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path

from relax.errors import UserError

HEADER = b"MMIDIDX\x00\x00"


class FieldBuilder:
    """Writes one field, int32."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._builder = IndexedDatasetBuilder(get_bin_path(path), dtype=np.int32)
        # Its two lists take some 70 bytes a row; the same numbers in arrays take 12.
        self._builder.sequence_lengths = array("i")
        self._builder.document_indices = array("q", [0])

    def add(self, ids: np.ndarray) -> None:
        """Append one row's sequence, as a document."""
        self._builder.add_document(ids, [len(ids)])

    def finish(self) -> None:
        """Complete the files."""
        self._builder.finalize(get_idx_path(self._path))


def create_field(path: str) -> FieldBuilder:
    """Begin to write `path`.bin and, at the end, `path`.idx."""
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
