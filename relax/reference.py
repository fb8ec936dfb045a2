"""Reference log-probs as a table of numbers (design idea 2): two floats per pair, computed once, kept in one file.

The file's name is a digest of everything that the numbers depend on: the reference's weights, the data, and the numeric
identity (dtype, device, layout, sharing, seed, batch, budget, library version). A row carries a digest of the pair's token
ids and of its two numbers, checked on every read, so that a row is right, or missing, never another pair's. Rows are written
as they are computed: an interrupted pass continues where it stopped.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

ROW = np.dtype([("check", "<u8", 2), ("scores", "<f4", 2)])


class ReferenceTable:
    """Rows for one data set, in memory as [num_pairs, 2] fp32 with NaN where missing; on disk where `path` is given."""

    def __init__(self, hashes: np.ndarray, *, path: Path | None) -> None:
        """hashes: uint8 [num_pairs, 16], the digest of each pair's token ids."""
        self.hashes = hashes
        self.values = np.full((len(hashes), 2), np.nan, dtype=np.float32)
        self._rows = self._open(path) if path else None
        if self._rows is not None:
            self._read()

    def _open(self, path: Path) -> np.memmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = len(self.hashes) * ROW.itemsize
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here; later, writing through the map would kill
        return np.memmap(path, dtype=ROW, mode="r+", shape=(len(self.hashes),))

    def _read(self) -> None:
        assert self._rows is not None
        for i in np.flatnonzero(self._rows["check"].any(axis=1)):
            if (self._rows["check"][i] == _check(self.hashes[i], self._rows["scores"][i])).all():
                self.values[i] = self._rows["scores"][i]

    @property
    def absent(self) -> np.ndarray:
        """The pairs that have no row yet, bool [num_pairs]."""
        return np.isnan(self.values[:, 0])

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Those of the pair indices that have no row yet."""
        return indices[np.isnan(self.values[indices, 0])]

    def put(self, indices: np.ndarray, scores: np.ndarray) -> None:
        """Store scores [len(indices), 2] of chosen and rejected."""
        self.values[indices] = scores
        if self._rows is None:
            return
        for i in indices:
            self._rows["scores"][i] = self.values[i]
            self._rows["check"][i] = _check(self.hashes[i], self.values[i])
        self._rows.flush()

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Scores [len(indices), 2]; KeyError where a row is missing."""
        absent = self.missing(indices)
        if len(absent):
            raise KeyError(f"reference log-probs of pair {absent[0]} were never computed")
        return self.values[indices]


def table_path(directory: Path, identity: dict[str, object]) -> Path:
    """The file of one identity; the identity itself lies beside it in plain JSON."""
    text = json.dumps(identity, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    directory.mkdir(parents=True, exist_ok=True)
    description = directory / f"reference-{digest}.json"
    aside = description.with_suffix(f".{os.getpid()}")
    aside.write_text(text + "\n")
    aside.replace(description)
    return directory / f"reference-{digest}.table"


def _check(pair_hash: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """What a row's `check` must be, uint64 [2]: a digest of the pair and of its two scores."""
    digest = hashlib.blake2b(pair_hash.tobytes() + scores.astype("<f4").tobytes(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8")
