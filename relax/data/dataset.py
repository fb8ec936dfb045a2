"""Tokenized pairs on disk: written once as flat arrays, read back through memory maps.

A cache entry is a directory of `tokens.bin` (int32, each pair as prompt, chosen, rejected), `lengths.npy`,
`hashes.npy`, `margins.npy` (where rows have margins) and `meta.json`. It is written beside its final name and renamed
when complete.

Invariants: an entry under its final name is complete; several processes may write the same entry, and one of them wins;
reading pair i touches only its own bytes; the same pairs give the same fingerprint wherever they came from.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from relax.data.report import DataReport
from relax.data.scratch import scratch_directory
from relax.errors import UserError

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """Token ids, int32 [num_tokens], of a shared prompt and its two answers; `margin` is 0.0 where the row has none."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    margin: float = 0.0

    @property
    def completions(self) -> tuple[np.ndarray, ...]:
        """Chosen, rejected."""
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBlock:
    """Some tokenized pairs in order.

    tokens: int32 [sum of lengths], each pair as prompt, chosen, rejected; lengths: int32 [pairs, 3]; trained: int32
    [pairs, 2], how many tokens of each answer are trained on; hashes: uint8 [pairs, 16]; margins: float32 [pairs], NaN
    where none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    hashes: np.ndarray
    margins: np.ndarray

    def select(self, keep: np.ndarray) -> "PairBlock":
        """The pairs where keep, bool [pairs], is True."""
        if keep.all():
            return self
        return PairBlock(
            tokens=self.tokens[np.repeat(keep, self.lengths.sum(axis=1))],
            lengths=self.lengths[keep],
            trained=self.trained[keep],
            hashes=self.hashes[keep],
            margins=self.margins[keep],
        )


class PairWriter(Protocol):
    """Where tokenized pairs go."""

    def add(self, pairs: PairBlock) -> None:
        """Append some pairs."""


class PairDataset:
    """Memory-mapped tokenized pairs.

    lengths: int64 [num_pairs, 3] of prompt, chosen, rejected.
    margins: float32 [num_pairs], or None where no row has one.
    hashes: uint8 [num_pairs, 16], blake2b-128 of each pair's ids (`worker.pair_hash`).
    fingerprint: SHA-256 of hashes and margins in order, hex.
    max_token_id: the largest id in the set; report: what became of the rows.
    """

    def __init__(self, directory: Path, *, report: DataReport, meta: dict[str, Any]) -> None:
        self.lengths: np.ndarray = np.load(directory / "lengths.npy")
        self.hashes: np.ndarray = np.load(directory / "hashes.npy")
        self.margins: np.ndarray | None = np.load(directory / "margins.npy") if meta["margins"] else None
        self.fingerprint: str = meta["fingerprint"]
        self.max_token_id: int = meta["max_token_id"]
        self.report = report
        self._tokens = np.memmap(directory / "tokens.bin", dtype="<i4", mode="r")
        self._ends = np.cumsum(self.lengths.sum(axis=1))

    @classmethod
    def open(cls, directory: Path, *, paths: Sequence[str], title: str) -> Self:
        """A complete cache entry, for data files that are called `paths` now."""
        meta = json.loads((directory / "meta.json").read_text())
        return cls(directory, report=DataReport.from_meta(meta["report"], title=title, paths=paths), meta=meta)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Numbers of the rows, by name, each [num_pairs]."""
        return {} if self.margins is None else {"margin": self.margins}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedPair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        prompt, chosen, _ = (int(length) for length in self.lengths[index])
        end = int(self._ends[index])
        start = end - int(self.lengths[index].sum())
        ids = np.asarray(self._tokens[start:end])
        return TokenizedPair(
            prompt=ids[:prompt],
            chosen=ids[prompt : prompt + chosen],
            rejected=ids[prompt + chosen :],
            margin=0.0 if self.margins is None else float(self.margins[index]),
        )


class EntryWriter:
    """Writes one cache entry, pairs in order; leaving the context without `publish` leaves nothing behind."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._scratch = scratch_directory(target)
        self._lengths: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._margins: list[np.ndarray] = []
        self._max_token_id = -1
        self._directory: Path
        self._tokens: BinaryIO

    def __enter__(self) -> Self:
        self._directory = self._scratch.__enter__()
        self._tokens = (self._directory / "tokens.bin").open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._tokens.close()
        finally:
            self._scratch.__exit__(kind, error, traceback)

    def add(self, pairs: PairBlock) -> None:
        """Append some pairs."""
        self._tokens.write(np.ascontiguousarray(pairs.tokens, "<i4").data)
        self._max_token_id = max(self._max_token_id, int(pairs.tokens.max(initial=-1)))
        self._lengths.append(pairs.lengths.astype(np.int64))
        self._hashes.append(pairs.hashes)
        self._margins.append(pairs.margins)

    def publish(self, report: dict[str, Any]) -> None:
        """Complete the entry and give it its name; an equal entry that another process published first stays."""
        lengths = np.concatenate([np.empty((0, 3), np.int64), *self._lengths])
        hashes = np.concatenate([np.empty((0, 16), np.uint8), *self._hashes])
        margins = np.concatenate([np.empty(0, np.float32), *self._margins])
        has_margins = not np.isnan(margins).all()
        margins = np.nan_to_num(margins, nan=0.0)
        digest = hashlib.sha256(hashes.tobytes())
        arrays = {"lengths": lengths, "hashes": hashes}
        if has_margins:
            digest.update(margins.astype("<f4").tobytes())
            arrays["margins"] = margins
        meta = {
            "version": FORMAT_VERSION,
            "margins": has_margins,
            "max_token_id": self._max_token_id,
            "fingerprint": digest.hexdigest(),
            "report": report,
        }
        for name, array in arrays.items():
            with (self._directory / f"{name}.npy").open("wb") as stream:
                np.save(stream, array)
                _sync(stream)
        with (self._directory / "meta.json").open("wb") as stream:
            stream.write(json.dumps(meta).encode())
            _sync(stream)
        _sync(self._tokens)
        try:
            os.rename(self._directory, self._target)
        except OSError:
            if not is_complete(self._target):
                raise


def is_complete(directory: Path) -> bool:
    """Whether an entry is there with all its bytes (a damaged one is removed, to be written again)."""
    if not directory.is_dir():
        return False
    try:
        lengths = np.load(directory / "lengths.npy", mmap_mode="r")
        meta = json.loads((directory / "meta.json").read_text())
        arrays = ["hashes"] + (["margins"] if meta["margins"] else [])
        rows = {len(np.load(directory / f"{name}.npy", mmap_mode="r")) for name in arrays}
        whole = rows == {len(lengths)} and (directory / "tokens.bin").stat().st_size == 4 * int(lengths.sum())
    except (OSError, ValueError, KeyError, EOFError):
        whole = False
    if not whole:
        shutil.rmtree(directory, ignore_errors=True)
    return whole


def cache_failure(directory: Path, error: OSError) -> UserError:
    """The message for a cache that cannot be written."""
    return UserError(
        f"{directory}: the tokenized data cannot be written: {error.strerror or error}. "
        "Free space, or choose another place with --data-cache-dir."
    )


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
