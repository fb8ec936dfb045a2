"""Tokenized pairs on disk: written once as flat arrays, read back through memory maps.

A cache entry is a directory of `tokens.bin` (int32, each pair as prompt, chosen, rejected), `lengths.npy`,
`hashes.npy`, `margins.npy` (where rows have margins), `meta.json`, the refused rows of the report, and the checksums of
all of them. It is written beside its final name and renamed when complete.

Invariants: an entry under its final name is complete; one that is damaged is told apart and written again; several
processes may write the same entry, and one of them wins; reading pair i touches only its own bytes; the same pairs give
the same fingerprint wherever they came from.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from relax.data.checksums import check_regular, damage, write_checksums
from relax.data.data_report import DataReport
from relax.data.scratch import scratch_directory
from relax.errors import UserError

FORMAT_VERSION = 2


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
        report = DataReport.from_meta(meta["report"], title=title, paths=paths, directory=directory)
        return cls(directory, report=report, meta=meta)

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

    def publish(self, report: DataReport) -> None:
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
            "report": report.to_meta(self._directory),
        }
        for name, array in arrays.items():
            np.save(self._directory / f"{name}.npy", array)
        (self._directory / "meta.json").write_text(json.dumps(meta))
        self._tokens.close()
        for file in self._directory.iterdir():
            _sync(file)
        write_checksums(self._directory)
        self._take_name()

    def _take_name(self) -> None:
        try:
            os.rename(self._directory, self._target)
        except OSError:
            problem = entry_problem(self._target)
            if problem == "":
                raise
            if problem:
                with scratch_directory(self._target) as aside:
                    os.rename(self._target, aside / "damaged")
                self._take_name()


def entry_problem(directory: Path) -> str | None:
    """None for an entry as it was written, "" where there is none, else what is damaged. UserError for links in its place."""
    try:
        check_regular(directory)
        return damage(directory) if directory.is_dir() else ""
    except OSError as error:
        raise cache_failure(directory.parent, error) from error


def cache_failure(directory: Path, error: OSError) -> UserError:
    """The message for a cache that cannot be written."""
    return UserError(
        f"{directory}: the tokenized data cannot be written: {error.strerror or error}. "
        "Free space, or choose another place with --data-cache-dir."
    )


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
