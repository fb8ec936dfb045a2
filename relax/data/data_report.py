"""What became of every row: the table for the console and the JSON for `data_report.json`.

Invariants: rows read = rows kept + rejected rows over all reasons; every refused row is listed under its reason's
stable code with file and row number, the first few with what was wrong. Memory grows neither with the rows read, whose
lengths are only counted, nor with the refused ones, which are kept on disk and go from file to file.
"""

import dataclasses
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from relax.data.limits import Mark
from relax.data.rows import DELIBERATE, REASONS

EXAMPLES = 5

MARK_NAMES = {
    Mark.TRUNCATED: ("truncated", "an answer was cut: no end token"),
    Mark.PROMPT_TRUNCATED: ("prompt_truncated", "the prompt lost tokens on its left"),
    Mark.OVERSIZE: ("oversize", "more tokens than the budget, both prompts counted"),
    Mark.PROMPT_SHRUNK: ("prompt_shrunk", "the template moved prompt tokens into the answers"),
}


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One data file: its path, detected row format and row count."""

    path: str
    format: str
    rows: int


class RowNumbers:
    """(file, row number) of some rows, in order, in a file without a name: any number of them takes the same memory."""

    ROW = struct.Struct("<qq")
    BLOCK = 4096 * ROW.size

    def __init__(self, stored: Path | None = None) -> None:
        """Empty, or what `save` wrote."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this object lives
        if stored:
            with stored.open("rb") as stream:
                shutil.copyfileobj(stream, self._file)
        self._count = self._file.tell() // self.ROW.size

    def append(self, row: tuple[int, int]) -> None:
        self._file.write(self.ROW.pack(*row))
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def _blocks(self) -> Iterator[bytes]:
        self._file.flush()
        for start in range(0, self._count * self.ROW.size, self.BLOCK):
            yield os.pread(self._file.fileno(), self.BLOCK, start)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for block in self._blocks():
            yield from self.ROW.iter_unpack(block)

    def save(self, path: Path) -> None:
        """Write them into a file of their own."""
        with path.open("wb") as stream:
            stream.writelines(self._blocks())


@dataclass(frozen=True, slots=True)
class Rejections:
    """The rows refused for one reason, and what was wrong with the first few."""

    rows: RowNumbers = field(default_factory=RowNumbers)
    details: list[str] = field(default_factory=list)

    def add(self, row: tuple[int, int], detail: str) -> None:
        self.rows.append(row)
        if len(self.details) < EXAMPLES:
            self.details.append(detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The report of one data set. `marks` counts kept pairs by what was done to them; lengths are in tokens.

    `unused_columns`: column -> rows in which it has content that nothing uses; `dropped_fields`: `role.field` -> rows in
    whose messages it has content that the chat template leaves out.
    `notes`: what a user should know of the set as a whole, a line each.
    """

    title: str
    files: tuple[FileSummary, ...]
    rows_kept: int
    rejected: dict[str, Rejections]
    marks: dict[str, int]
    unused_columns: dict[str, int]
    dropped_fields: dict[str, int]
    tokens: dict[str, dict[str, float]]
    notes: tuple[str, ...] = ()

    @property
    def rows_read(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def rows_rejected(self) -> int:
        return sum(len(rejections.rows) for rejections in self.rejected.values())

    @property
    def rows_bad(self) -> int:
        """Rejected rows without those that were dropped as asked."""
        return sum(len(rejections.rows) for code, rejections in self.rejected.items() if code not in DELIBERATE)

    def where(self, row: tuple[int, int]) -> str:
        """`file:row number` of a row."""
        return f"{self.files[row[0]].path}:{row[1]}"

    def with_notes(self, *notes: str) -> Self:
        """The report with more notes, behind those that it has."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))

    def to_meta(self, directory: Path) -> dict[str, Any]:
        """What a cache entry keeps: everything but the title and the paths, which a later reader may know otherwise.

        The refused rows go into files of their own in `directory`.
        """
        meta = dataclasses.asdict(dataclasses.replace(self, rejected={}))
        for code, rejections in self.rejected.items():
            rejections.rows.save(_rows_file(directory, code))
            meta["rejected"][code] = rejections.details
        del meta["title"]
        for file in meta["files"]:
            del file["path"]
        return meta

    @classmethod
    def from_meta(cls, meta: dict[str, Any], *, title: str, paths: Sequence[str], directory: Path) -> Self:
        """The report of a cache entry, for the files as they are called now."""
        files = (FileSummary(path=path, **file) for path, file in zip(paths, meta["files"], strict=True))
        rejected = {
            code: Rejections(rows=RowNumbers(_rows_file(directory, code)), details=details)
            for code, details in meta["rejected"].items()
        }
        return cls(title=title, **{**meta, "files": tuple(files), "rejected": rejected, "notes": tuple(meta["notes"])})

    def table(self) -> str:
        """The report for the console."""
        lines = [f"{self.title}: {self.rows_kept:,} of {counted(self.rows_read, 'row')} kept"]
        lines += [f"  {file.path}: {file.format}, {counted(file.rows, 'row')}" for file in self.files]
        lines += [f"  {note}" for note in self.notes]
        for code, rejections in self.rejected.items():
            lines.append(f"  rejected {code}: {len(rejections.rows):,} ({REASONS[code]})")
            for row, detail in zip(rejections.rows, rejections.details, strict=False):
                lines.append(f"    {self.where(row)}: {detail}")
        for name, meaning in MARK_NAMES.values():
            if count := self.marks.get(name):
                lines.append(f"  {name}: {counted(count, 'pair')} ({meaning})")
        for what, names in (
            ("columns with content that nothing uses", self.unused_columns),
            ("fields of messages that the chat template leaves out", self.dropped_fields),
        ):
            if names:
                lines.append(f"  {what}: " + ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in names.items()))
        if self.tokens:
            heads = list(next(iter(self.tokens.values())))
            lines.append(f"  {'tokens':<10}" + "".join(f"{head:>10}" for head in heads))
            for part, values in self.tokens.items():
                lines.append(f"  {part:<10}" + "".join(f"{values[head]:>10,.0f}" for head in heads))
        return "\n".join(lines)

    def to_json(self, *, rows: Callable[[Iterable[str]], list[str]] = list) -> dict[str, Any]:
        """The whole report; every refused row is in it, in lists that `rows` makes."""
        return {
            "title": self.title,
            "files": [{"path": file.path, "format": file.format, "rows": file.rows} for file in self.files],
            "notes": list(self.notes),
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "rows_rejected": self.rows_rejected,
            "rejected": {
                code: {
                    "count": len(rejections.rows),
                    "examples": [
                        {"row": self.where(row), "detail": detail}
                        for row, detail in zip(rejections.rows, rejections.details, strict=False)
                    ],
                    "rows": rows(map(self.where, rejections.rows)),
                }
                for code, rejections in self.rejected.items()
            },
            "pairs": self.marks,
            "unused_columns": self.unused_columns,
            "dropped_fields": self.dropped_fields,
            "tokens": self.tokens,
        }


def _rows_file(directory: Path, code: str) -> Path:
    return directory / f"rejected_{code}.bin"


class OneByOne(list[str]):
    """What `json.dump` writes as a list, taking one element after another."""

    def __init__(self, elements: Iterable[str]) -> None:
        super().__init__()
        self._elements = elements

    def __bool__(self) -> bool:  # it would write nothing of an empty list
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._elements)


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class TokenCounts:
    """Token counts of the kept groups: exact statistics of any number of them, from how often each length comes."""

    def __init__(self) -> None:
        self.groups = 0
        self._prompts: Counter[int] = Counter()
        self._totals: Counter[int] = Counter()
        self._completions: list[Counter[int]] = []  # by their place in the group

    def add(self, lengths: np.ndarray) -> None:
        """Count some groups, `lengths` int [num_groups, 1 + K]. `total` has the prompt for each completion: 2P + C + R."""
        self.groups += len(lengths)
        copies = np.count_nonzero(lengths[:, 1:], axis=1)
        self._prompts.update(lengths[:, 0].tolist())
        self._totals.update((lengths.sum(axis=1) + (copies - 1) * lengths[:, 0]).tolist())
        self._completions += [Counter() for _ in range(lengths.shape[1] - 1 - len(self._completions))]
        for counts, values in zip(self._completions, lengths[:, 1:].T, strict=False):
            counts.update(values[values > 0].tolist())

    def statistics(self) -> dict[str, dict[str, float]]:
        """By part: the prompt, chosen and rejected of pairs, else any completion, the whole."""
        if not self.groups:
            return {}
        pairs = [counts.total() for counts in self._completions] == [self.groups, self.groups]
        completions = {"completion": sum(self._completions, Counter())}
        if pairs:
            completions = dict(zip(("chosen", "rejected"), self._completions, strict=True))
        parts = {"prompt": self._prompts, **completions, "total": self._totals}
        return {part: self._part(counts) for part, counts in parts.items()}

    def _part(self, counts: Counter[int]) -> dict[str, float]:
        """Percentiles are numpy's, linear between neighbours."""
        values, number = sorted(counts), counts.total()
        ends = np.cumsum([counts[value] for value in values])
        total = sum(value * count for value, count in counts.items())

        def percentile(percent: int) -> float:
            place, between = divmod((number - 1) * percent, 100)
            low, high = (values[np.searchsorted(ends, place + step, side="right")] for step in (0, between > 0))
            return low + (high - low) * between / 100

        percentiles = {f"p{percent}": percentile(percent) for percent in (50, 90, 99)}
        return {
            "min": float(values[0]),
            "mean": total / number,
            **percentiles,
            "max": float(values[-1]),
            "sum": float(total),
        }
