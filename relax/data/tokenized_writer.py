"""Pairs -> a tokenized prefix on disk.

Invariants: the files appear under their final names only when all are complete; an older prefix of the same name is
taken away first, index by index, so that no mixture of both can ever be read; memory does not grow with the pairs.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from relax.data.dataset import GroupBlock
from relax.data.fingerprint import file_sha256
from relax.data.prefix import IGNORED, INSTRUCTION_FIELDS, PAIR_FIELDS, field_files, field_path, sidecar_path
from relax.data.scratch import scratch_directory
from relax.data.tokenized import FieldBuilder, IndexedFormat


class TokenizedWriter:
    """Writes one prefix, pairs in order; leaving the context without `publish` leaves nothing behind."""

    def __init__(self, prefix: Path, *, indexed: IndexedFormat, instructions: bool) -> None:
        self._prefix = prefix
        self._indexed = indexed
        self._instructions = instructions
        self._fields = INSTRUCTION_FIELDS if instructions else PAIR_FIELDS
        self._num_pairs = 0
        self._scratch = scratch_directory(prefix)
        self._aside: Path  # the prefix inside the scratch directory
        self._builders: dict[str, FieldBuilder]

    def __enter__(self) -> Self:
        self._aside = self._scratch.__enter__() / self._prefix.name
        self._builders = {field: self._indexed.create_field(field_path(self._aside, field)) for field in self._fields}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._scratch.__exit__(kind, error, traceback)

    def add(self, pairs: GroupBlock) -> None:
        """Append some pairs."""
        for row in instruction_rows(pairs) if self._instructions else pair_rows(pairs):
            for field, ids in row.items():
                self._builders[field].add(ids)
        self._num_pairs += len(pairs.lengths)

    def publish(self, sidecar: Mapping[str, Any]) -> None:
        """Complete the files, describe them in the sidecar, and give all of them their names."""
        for builder in self._builders.values():
            builder.finish()
        digests: dict[str, str] = {}
        for field in self._fields:
            for file in field_files(self._aside, field):
                _sync(file)
                digests[file.name.removeprefix(self._aside.name)] = file_sha256(file)
        with sidecar_path(self._aside).open("w", encoding="utf-8") as stream:
            described = {**sidecar, "num_pairs": self._num_pairs, "files": digests}
            json.dump(described, stream, indent=1, ensure_ascii=False)
            stream.write("\n")
        _sync(sidecar_path(self._aside))
        self._remove_older()
        # Indexes follow the data, and the sidecar comes last: an incomplete prefix cannot be taken for a complete one.
        order = [field_files(self._aside, field)[part] for part in (0, 1) for field in self._fields]
        for file in [*order, sidecar_path(self._aside)]:
            os.replace(file, self._prefix.with_name(file.name))

    def _remove_older(self) -> None:
        for part in (1, 0):
            for field in (*PAIR_FIELDS, *INSTRUCTION_FIELDS):
                field_files(self._prefix, field)[part].unlink(missing_ok=True)
        sidecar_path(self._prefix).unlink(missing_ok=True)


def pair_rows(pairs: GroupBlock) -> Iterator[Mapping[str, np.ndarray]]:
    """Each pair as the fields of a row."""
    for (prompt, chosen, rejected), trained in _split(pairs):
        yield {
            "chosen_input_ids": np.concatenate([prompt, chosen]),
            "chosen_labels": _labels(prompt, chosen, int(trained[0])),
            "rejected_input_ids": np.concatenate([prompt, rejected]),
            "rejected_labels": _labels(prompt, rejected, int(trained[1])),
        }


def instruction_rows(instructions: GroupBlock) -> Iterator[Mapping[str, np.ndarray]]:
    """Each instruction, a group of one, as the fields of a row."""
    for (prompt, response), trained in _split(instructions):
        ids = np.concatenate([prompt, response])
        yield {"input_ids": ids, "labels": _labels(prompt, response, int(trained[0])), "attention_mask": np.ones_like(ids)}


def _split(groups: GroupBlock) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray]]:
    """(the prompt and the completions, trained [K]) of each group; all have as many completions."""
    parts = iter(np.split(groups.tokens, np.cumsum(groups.lengths)[:-1]) if len(groups.lengths) else [])
    yield from zip(zip(*[parts] * groups.lengths.shape[1], strict=True), groups.trained, strict=True)


def _labels(prompt: np.ndarray, completion: np.ndarray, trained: int) -> np.ndarray:
    labels = np.full(len(prompt) + len(completion), IGNORED, dtype=np.int32)
    labels[len(prompt) : len(prompt) + trained] = completion[:trained]
    return labels


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
