"""Tokenized groups on disk: written once as flat arrays, read back through memory maps.

A cache entry is a directory of `tokens.bin` (int32, each group as its prompt and its completions, best first), `lengths.npy`,
`hashes.npy`, `ranks.npy` (where completions are tied), `column_NAME.npy` (where rows have that number), `meta.json`, the
refused rows of the report, and the checksums of all of them. It is written beside its final name and renamed when complete.

Invariants: an entry under its final name is complete; one that is damaged is told apart and written again; several
processes may write the same entry, and one of them wins; reading group i touches only its own bytes; the same groups give
the same fingerprint wherever they came from; pairs have the fingerprints that checkpoints and reference tables know them by.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from relax.data.checksums import check_regular, damage, write_checksums
from relax.data.columns import COLUMNS
from relax.data.data_report import DataReport
from relax.data.scratch import scratch_directory
from relax.errors import UserError

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class TokenizedGroup:
    """Token ids, int32 [num_tokens], of a prompt and of each of its completions, best first."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlock:
    """Some tokenized groups in order; K: the most completions of one.

    tokens: int32 [sum of lengths], each group as its prompt and its completions; lengths: int32 [groups, 1 + K], 0 where it has
    fewer than K; trained: int32 [groups, K], how many tokens of each completion are trained on; hashes: uint8 [groups, 16];
    ranks: int32 [groups, K], from 1, the best; None where no completions are tied; columns: {name: float32 [groups]}, NaN where
    the row has none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    hashes: np.ndarray
    ranks: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def select(self, keep: np.ndarray) -> "GroupBlock":
        """The groups where keep, bool [groups], is True."""
        if keep.all():
            return self
        return GroupBlock(
            tokens=self.tokens[np.repeat(keep, self.lengths.sum(axis=1))],
            lengths=self.lengths[keep],
            trained=self.trained[keep],
            ranks=None if self.ranks is None else self.ranks[keep],
            hashes=self.hashes[keep],
            columns={name: values[keep] for name, values in self.columns.items()},
        )


class GroupWriter(Protocol):
    """Where tokenized groups go."""

    def add(self, groups: GroupBlock) -> None:
        """Append some groups."""


class GroupDataset:
    """Memory-mapped tokenized groups.

    lengths: int64 [num_groups, 1 + K] of the prompt and of each completion, 0 where a group has fewer than K.
    ranks: int32 [num_groups, K] from 1, the best, 0 where a group has fewer; None where no completions are tied.
    columns: {name: float32 [num_groups]}, of those that any row has, with `Column.default` where a row has none.
    hashes: uint8 [num_groups, 16], blake2b-128 of each group's ids (`worker.group_hash`).
    fingerprint: SHA-256 of hashes, columns and ranks in order, hex. scored_fingerprint: without what moves no score, though
    margins, which were always in it, are.
    max_token_id: the largest id in the set; report: what became of the rows.
    """

    def __init__(self, directory: Path, *, report: DataReport, meta: dict[str, Any]) -> None:
        self.lengths: np.ndarray = np.load(directory / "lengths.npy")
        self.hashes: np.ndarray = np.load(directory / "hashes.npy")
        self.ranks: np.ndarray | None = np.load(directory / "ranks.npy") if meta["ranks"] else None
        self._given = {name: np.load(directory / f"column_{name}.npy") for name in meta["columns"]}
        self.columns = {name: _filled(name, values) for name, values in self._given.items()}
        self.fingerprint: str = meta["fingerprint"]
        self.scored_fingerprint: str = meta["scored_fingerprint"]
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
    def num_completions(self) -> int:
        """The most completions of a group."""
        return self.lengths.shape[1] - 1

    def lacking(self, column: str) -> np.ndarray:
        """The groups, bool [num_groups], whose row has no number in a column, though it could have one."""
        lacks = np.isnan(self._given[column]) if column in self._given else np.ones(len(self), dtype=bool)
        return lacks & (np.count_nonzero(self.lengths[:, 1:], axis=1) == 1) if COLUMNS[column].single else lacks

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedGroup:
        if not 0 <= index < len(self):
            raise IndexError(f"group {index} of {len(self)}")
        lengths = self.lengths[index].tolist()
        end = int(self._ends[index])
        start = end - sum(lengths)
        ids = np.asarray(self._tokens[start:end])
        ends = list(itertools.accumulate(lengths))
        completions = (ids[first:last] for first, last in itertools.pairwise(ends))
        return TokenizedGroup(ids[: ends[0]], tuple(part for part in completions if len(part)))


def _filled(name: str, values: np.ndarray) -> np.ndarray:
    """A column with its default where a row has no number."""
    return np.nan_to_num(values, nan=COLUMNS[name].default)


class EntryWriter:
    """Writes one cache entry, groups in order; leaving the context without `publish` leaves nothing behind."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._scratch = scratch_directory(target)
        self._blocks: list[GroupBlock] = []  # without what is on disk or not kept
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

    def add(self, groups: GroupBlock) -> None:
        """Append some groups."""
        self._tokens.write(np.ascontiguousarray(groups.tokens, "<i4").data)
        self._max_token_id = max(self._max_token_id, int(groups.tokens.max(initial=-1)))
        self._blocks.append(replace(groups, tokens=groups.tokens[:0], trained=groups.trained[:0]))

    def publish(self, report: DataReport) -> None:
        """Complete the entry and give it its name; an equal entry that another process published first stays."""
        hashes = np.concatenate([np.empty((0, 16), np.uint8), *(block.hashes for block in self._blocks)])
        columns = self._columns()
        digest = hashlib.sha256(hashes.tobytes())
        if "margin" in columns:
            digest.update(_filled("margin", columns["margin"]).astype("<f4").tobytes())
        scored = digest.hexdigest()
        for name in (name for name in columns if name != "margin"):
            digest.update(name.encode() + columns[name].astype("<f4").tobytes())
        arrays = {"lengths": _stacked([block.lengths for block in self._blocks]).astype(np.int64), "hashes": hashes}
        arrays |= {f"column_{name}": column for name, column in columns.items()}
        ranks = self._ranks()
        if ranks is not None:
            digest.update(b"ranks" + ranks.astype("<i4").tobytes())
            arrays["ranks"] = ranks
        meta = {
            "version": FORMAT_VERSION,
            "columns": list(columns),
            "ranks": ranks is not None,
            "max_token_id": self._max_token_id,
            "fingerprint": digest.hexdigest(),
            "scored_fingerprint": scored,
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

    def _columns(self) -> dict[str, np.ndarray]:
        """The columns in which any row has a number, sorted by name, NaN where one has none."""
        names = sorted({name for block in self._blocks for name in block.columns})
        columns = {name: np.concatenate([block.columns[name] for block in self._blocks]) for name in names}
        return {name: column for name, column in columns.items() if not np.isnan(column).all()}

    def _ranks(self) -> np.ndarray | None:
        """Ranks int32 [num_groups, K], None where no completions are tied."""
        if all(block.ranks is None for block in self._blocks):
            return None
        ranks = _stacked([_best_first(block.lengths) if block.ranks is None else block.ranks for block in self._blocks])
        return ranks if ((ranks[:, 1:] == ranks[:, :-1]) & (ranks[:, 1:] > 0)).any() else None

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


def _best_first(lengths: np.ndarray) -> np.ndarray:
    """Ranks int32 [groups, K] of groups whose completions are not tied."""
    return np.where(lengths[:, 1:] > 0, np.arange(1, lengths.shape[1], dtype=np.int32), np.int32(0))


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of [rows, width] each, one above the other, 0 where one is narrower."""
    width = max((part.shape[1] for part in parts), default=0)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


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
