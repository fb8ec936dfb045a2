"""What became of every row: the table for the console and the JSON for `data_report.json`.

Invariants: rows read = rows kept + rejected rows over all reasons; every refused row is listed under its reason's
stable code with file and row number, the first few with what was wrong.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Rejections:
    """The rows refused for one reason: (file, row number) of each, and what was wrong with the first few."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def add(self, row: tuple[int, int], detail: str) -> None:
        self.rows.append(row)
        if len(self.details) < EXAMPLES:
            self.details.append(detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The report of one data set. `marks` counts kept pairs by what was done to them; lengths are in tokens."""

    title: str
    files: tuple[FileSummary, ...]
    rows_kept: int
    rejected: dict[str, Rejections]
    marks: dict[str, int]
    unused_columns: dict[str, int]
    tokens: dict[str, dict[str, float]]

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

    def to_meta(self) -> dict[str, Any]:
        """What a cache entry keeps: everything but the title and the paths, which a later reader may know otherwise."""
        meta = dataclasses.asdict(self)
        del meta["title"]
        for file in meta["files"]:
            del file["path"]
        return meta

    @classmethod
    def from_meta(cls, meta: dict[str, Any], *, title: str, paths: Sequence[str]) -> Self:
        """The report of a cache entry, for the files as they are called now."""
        files = (FileSummary(path=path, **file) for path, file in zip(paths, meta["files"], strict=True))
        rejected = {
            code: Rejections(rows=[(file, number) for file, number in value["rows"]], details=value["details"])
            for code, value in meta["rejected"].items()
        }
        return cls(title=title, **{**meta, "files": tuple(files), "rejected": rejected})

    def table(self) -> str:
        """The report for the console."""
        lines = [f"{self.title}: {self.rows_kept:,} of {counted(self.rows_read, 'row')} kept"]
        lines += [f"  {file.path}: {file.format}, {counted(file.rows, 'row')}" for file in self.files]
        for code, rejections in self.rejected.items():
            lines.append(f"  rejected {code}: {len(rejections.rows):,} ({REASONS[code]})")
            for row, detail in zip(rejections.rows, rejections.details, strict=False):
                lines.append(f"    {self.where(row)}: {detail}")
        for name, meaning in MARK_NAMES.values():
            if count := self.marks.get(name):
                lines.append(f"  {name}: {counted(count, 'pair')} ({meaning})")
        if self.unused_columns:
            columns = ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in self.unused_columns.items())
            lines.append(f"  columns with content that nothing uses: {columns}")
        if self.tokens:
            names = list(next(iter(self.tokens.values())))
            lines.append(f"  {'tokens':<10}" + "".join(f"{name:>10}" for name in names))
            for part, values in self.tokens.items():
                lines.append(f"  {part:<10}" + "".join(f"{values[name]:>10,.0f}" for name in names))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The whole report; every refused row is in it."""
        return {
            "title": self.title,
            "files": [{"path": file.path, "format": file.format, "rows": file.rows} for file in self.files],
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
                    "rows": [self.where(row) for row in rejections.rows],
                }
                for code, rejections in self.rejected.items()
            },
            "pairs": self.marks,
            "unused_columns": self.unused_columns,
            "tokens": self.tokens,
        }


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def token_statistics(lengths: np.ndarray) -> dict[str, dict[str, float]]:
    """Token counts of the kept pairs; `lengths` int [num_pairs, 3] of P, C, R. `total` is 2P + C + R."""
    if not len(lengths):
        return {}
    total = lengths.sum(axis=1) + lengths[:, 0]
    parts: Sequence[tuple[str, np.ndarray]] = (
        ("prompt", lengths[:, 0]),
        ("chosen", lengths[:, 1]),
        ("rejected", lengths[:, 2]),
        ("total", total),
    )
    return {
        name: {
            "min": float(values.min()),
            "mean": float(values.mean()),
            "p50": float(np.percentile(values, 50)),
            "p90": float(np.percentile(values, 90)),
            "p99": float(np.percentile(values, 99)),
            "max": float(values.max()),
            "sum": float(values.sum()),
        }
        for name, values in parts
    }
