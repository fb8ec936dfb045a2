"""Reference log-probs as a table of numbers (design idea 2): a float per completion, computed once, kept in one file.

The file's name is a digest of everything that the numbers depend on: the reference's weights, the data, and the numeric
identity (dtype, device, layout, sharing, seed, batch, budget, library version). A row carries a digest of the group's token
ids and of its numbers, checked on every read, so that a row is right, or missing, never another group's. Rows are written
as they are computed: an interrupted pass continues where it stopped. A pass that ends leaves a checksum of the whole file
beside it: while that holds, the rows are those that were written, and millions are read in the time of one look at the file.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import xxhash

from relax.data.checksums import check_regular
from relax.data.scratch import whole_file


def row_dtype(width: int) -> np.dtype[np.void]:
    """A group's row on disk, for groups of at most `width` completions."""
    return np.dtype([("check", "<u8", 2), ("scores", "<f4", width)])


class ReferenceTable:
    """Rows for one data set, in memory as [num_groups, width] fp32 with NaN where missing; on disk where `path` is given.

    width: the most completions of a group; one with fewer has 0 for those that it lacks.
    """

    def __init__(self, hashes: np.ndarray, *, width: int, path: Path | None) -> None:
        """hashes: uint8 [num_groups, 16], the digest of each group's token ids. UserError for a link in the file's place."""
        self.hashes = hashes
        self.values = np.full((len(hashes), width), np.nan, dtype=np.float32)
        self.damaged = 0  # rows that were not as they were written, or not written whole; they are absent
        self.path = path
        self._rows = self._open(path) if path else None
        self._sealed = False
        if self._rows is not None:
            self._read()

    def _open(self, path: Path) -> np.memmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        row = row_dtype(self.values.shape[1])
        size = len(self.hashes) * row.itemsize
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(size)
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so here; later, writing through the map would kill
            return np.memmap(file, dtype=row, mode="r+", shape=(len(self.hashes),))

    def _read(self) -> None:
        assert self._rows is not None
        written = np.flatnonzero(self._rows["check"].any(axis=1))
        self._sealed = self._seal_holds()
        if not self._sealed:
            checks = np.array([_check(self.hashes[i], self._rows["scores"][i]) for i in written], "<u8").reshape(-1, 2)
            right = (self._rows["check"][written] == checks).all(axis=1)
            self._rows["check"][written[~right]] = 0  # before a seal covers them
            self.damaged, written = int((~right).sum()), written[right]
        self.values[written] = self._rows["scores"][written]

    def seal(self) -> None:
        """Keep a checksum of the file as it is now, for the next one that reads it."""
        if self.path and not self._sealed:
            with whole_file(_seal_path(self.path)) as stream:
                stream.write(self._checksum() + "\n")
            self._sealed = True

    def _seal_holds(self) -> bool:
        assert self.path
        check_regular(seal := _seal_path(self.path))
        return seal.exists() and seal.read_text("latin-1").strip() == self._checksum()

    def _checksum(self) -> str:
        """Of the groups' digests and of every byte of the file."""
        assert self._rows is not None
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.hashes).data)
        digest.update(self._rows.view(np.uint8).data)
        return digest.hexdigest()

    @property
    def absent(self) -> np.ndarray:
        """The groups that have no row yet, bool [num_groups]."""
        return np.isnan(self.values[:, 0])

    def missing(self, indices: np.ndarray) -> np.ndarray:
        """Those of the group indices that have no row yet."""
        return indices[np.isnan(self.values[indices, 0])]

    def put(self, indices: np.ndarray, scores: np.ndarray) -> None:
        """Store scores [len(indices), width] of the completions, best first."""
        self.values[indices] = scores
        if self._rows is None:
            return
        self._sealed = False
        for i in indices:
            self._rows["scores"][i] = self.values[i]
            self._rows["check"][i] = _check(self.hashes[i], self.values[i])
        self._rows.flush()

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Scores [len(indices), width]; KeyError where a row is missing."""
        absent = self.missing(indices)
        if len(absent):
            raise KeyError(f"reference log-probs of group {absent[0]} were never computed")
        return self.values[indices]


def table_path(directory: Path, identity: dict[str, object]) -> Path:
    """The file of one identity; the identity itself lies beside it in plain JSON."""
    text = json.dumps(identity, sort_keys=True, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    directory.mkdir(parents=True, exist_ok=True)
    description = directory / f"reference-{digest}.json"
    with whole_file(description) as stream:
        stream.write(text + "\n")
    return directory / f"reference-{digest}.table"


def _seal_path(table: Path) -> Path:
    return table.with_suffix(".xxh128")


def _check(group_hash: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """What a row's `check` must be, uint64 [2]: a digest of the group and of its scores."""
    digest = hashlib.blake2b(group_hash.tobytes() + scores.astype("<f4").tobytes(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8")
