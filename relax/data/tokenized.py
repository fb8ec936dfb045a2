"""Tokenized prefixes: rows of token ids and labels -> pairs.

A row's labels are its ids where they are trained on and -100 elsewhere: over the prompt, and over what the template
writes behind the end token, which a policy is not trained on and a reward model reads. So one file serves both. Where a
template writes no end token, the one that the pipeline adds is in the file, and a reward model reads it too.

Invariants: a pair that was written is read back as the same `GroupIds`; labels that are not the ids under which they
stand are refused as `schema`; the two sides' prompts are equal or the row is refused as `prompt_mismatch`. The format
on disk belongs to `IndexedFormat`, which the commands hand in.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from relax.data.columns import Columns
from relax.data.prefix import IGNORED, PAIR_FIELDS, field_path, sidecar_path
from relax.data.render import GroupIds
from relax.data.rows import RowRejected
from relax.data.scan import FileScan
from relax.data.sources import CHUNK_ROWS, Chunk
from relax.errors import UserError


class FieldBuilder(Protocol):
    """Writes one field."""

    def add(self, ids: np.ndarray) -> None:
        """Append one row's sequence."""

    def finish(self) -> None:
        """Complete the files."""


class IndexedFormat(Protocol):
    """Files of sequences on disk; `path` is a field's without a suffix."""

    def create_field(self, path: str) -> FieldBuilder:
        """Begin to write a field."""

    def open_field(self, path: str) -> Sequence[np.ndarray]:
        """A field's sequences. Raises `UserError` for what is no such file."""


def open_fields(prefix: Path, indexed: IndexedFormat | None) -> list[Sequence[np.ndarray]]:
    """The rows of each of `PAIR_FIELDS`. Raises `UserError` for fields of different length."""
    if indexed is None:
        raise UserError(f"{prefix}: already tokenized; this command reads rows of text.")
    fields = [indexed.open_field(field_path(prefix, field)) for field in PAIR_FIELDS]
    if len({len(rows) for rows in fields}) > 1:
        found = ", ".join(f"{field} {len(rows):,}" for field, rows in zip(PAIR_FIELDS, fields, strict=True))
        raise UserError(f"{prefix}: its fields have different numbers of rows: {found}. Preprocess the data again.")
    return fields


def scan_tokenized(prefix: Path, indexed: IndexedFormat | None) -> FileScan:
    """What `scan_file` finds of a file of text."""
    columns = Columns(names={}, fields={}, roles={}, pair_id=None)
    name = "tokenized" if sidecar_path(prefix).is_file() else "tokenized, no sidecar to check it by"
    return FileScan(name, columns, len(open_fields(prefix, indexed)[0]), tokenized=True)


def read_tokenized(prefix: Path, indexed: IndexedFormat | None, *, file: int) -> Iterator[Chunk]:
    """The prefix's rows in chunks, each a list of its fields. Raises `UserError` for a negative token id."""
    fields = open_fields(prefix, indexed)
    for start in range(0, len(fields[0]), CHUNK_ROWS):
        numbers = range(start + 1, min(start + CHUNK_ROWS, len(fields[0])) + 1)
        rows = [[np.array(field[number - 1], dtype=np.int32) for field in fields] for number in numbers]
        for number, row in zip(numbers, rows, strict=True):
            least = min(int(ids.min(initial=0)) for ids in row[::2])
            if least < 0:
                raise UserError(f"{prefix}:{number}: token id {least} is in no vocabulary.")
        yield Chunk(file, numbers, rows)


def read_row(row: Sequence[np.ndarray]) -> GroupIds:
    """One row's fields, in the order of `PAIR_FIELDS`, as a pair. Raises `RowRejected`."""
    sides = dict(zip(("chosen", "rejected"), (row[:2], row[2:]), strict=True))
    spans = {side: _trained_span(*fields, side=side) for side, fields in sides.items()}
    (start, end), (other_start, other_end) = spans.values()
    chosen, rejected = sides["chosen"][0], sides["rejected"][0]
    if not start or not np.array_equal(chosen[:start], rejected[:other_start]):
        raise RowRejected("prompt_mismatch", "the two sides have different tokens before their answers, or none")
    trained = end - start, other_end - start
    completions = chosen[start:], rejected[start:]
    return GroupIds(chosen[:start], completions, trained=trained, rendered=(len(completions[0]), len(completions[1])))


def _trained_span(ids: np.ndarray, labels: np.ndarray, *, side: str) -> tuple[int, int]:
    """[start, end) of the tokens that are trained on."""
    if len(ids) != len(labels):
        raise RowRejected("schema", f"{side} has {len(ids)} ids and {len(labels)} labels")
    trained = np.flatnonzero(labels != IGNORED)
    if not len(trained):
        raise RowRejected("empty_completion", f"no token of {side} is trained on")
    start, end = int(trained[0]), int(trained[-1]) + 1
    if end - start != len(trained) or not np.array_equal(ids[start:end], labels[start:end]):
        raise RowRejected("schema", f"the labels of {side} are not the ids of one answer")
    return start, end
