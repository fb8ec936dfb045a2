"""Data files -> tokenized groups in a writer, and the report of what became of every row.

files -> scan (format, columns, broken lines) -> chunks -> workers (rows, render, encode, limits) -> duplicates out ->
writer. Training writes a cache entry, preprocessing a tokenized prefix: the same path, so the same groups.

Invariants: the groups depend on file contents, tokenizer and options alone; they come in the same order for any number
of workers; memory is bounded by a few chunks per worker, plus what the writer keeps of a group.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax.data.data_report import MARK_NAMES, DataReport, FileSummary, Rejections, TokenCounts, counted
from relax.data.dataset import GroupWriter
from relax.data.options import DataOptions
from relax.data.prefix import is_prefix
from relax.data.provenance import check_provenance
from relax.data.rows import DELIBERATE, REASONS
from relax.data.scan import FileScan, scan_file
from relax.data.seen import SeenRows
from relax.data.sources import Chunk, read_chunks
from relax.data.tokenized import IndexedFormat, read_tokenized, scan_tokenized
from relax.data.worker import ChunkResult, ChunkTokenizer, Rejection, tokenize_chunks
from relax.errors import UserError

# Below this many rows a pool costs more than it saves: each spawned process imports and loads the tokenizer first.
MIN_ROWS_FOR_POOL = 4096

# What to do where most rows are refused for a reason. A duplicate is never that: the row it repeats was kept.
ADVICE = {
    "schema": "Check the rows below; --prompt-key, --chosen-key, --rejected-key and --conversation-key-map name the columns "
    "(in preprocessing: map_keys).",
    "prompt_mismatch": "Give both sides the same history, or put it into a prompt column and leave only the answers there.",
    "identical": "Check that --chosen-key and --rejected-key name two different answers.",
    "post_truncation_identical": "The completions differ only behind --preference-max-completion-length: raise it.",
    "empty_completion": "Fill in the completions, or use a chat template that writes what they hold (tool calls, reasoning).",
    "oversize": "Raise --max-tokens-per-gpu, or choose another --sft-oversize-strategy (in preprocessing: raise seq_length).",
    "boundary": "The chat template rewrites the conversation once it is answered: use one that does not.",
}


def scan_files(files: Sequence[Path], *, options: DataOptions, indexed: IndexedFormat | None) -> list[FileScan]:
    """Read every file once, so that a broken line in the last megabyte is reported before any work. Raises `UserError`."""
    return [scan_tokenized(path, indexed) if is_prefix(path) else scan_file(path, options=options) for path in files]


def tokenize_files(
    files: Sequence[Path],
    scans: Sequence[FileScan],
    writer: GroupWriter,
    *,
    tokenizer: Any,
    tokenizer_dir: Path,
    options: DataOptions,
    num_workers: int,
    title: str,
    indexed: IndexedFormat | None,
    progress: Callable[[int, int], None],
) -> DataReport:
    """Write the groups of `files` and report; `progress` hears of (rows done, rows in all). Raises as `load_pairs` does."""
    for path, scan in zip(files, scans, strict=True):
        if scan.tokenized:
            check_provenance(path, num_pairs=scan.num_rows, tokenizer=tokenizer, tokenizer_dir=tokenizer_dir, options=options)
    tokenize = ChunkTokenizer(tokenizer, scans=scans, options=options)  # the self-check, before any process starts
    num_rows = sum(scan.num_rows for scan in scans if not scan.tokenized)
    results = tokenize_chunks(
        read_files(files, indexed=indexed),
        tokenize,
        tokenizer_dir=tokenizer_dir,
        scans=scans,
        options=options,
        num_workers=num_workers if num_rows >= MIN_ROWS_FOR_POOL else 1,
    )
    summaries = tuple(FileSummary(str(path), scan.format, scan.num_rows) for path, scan in zip(files, scans, strict=True))
    collector = Collector(writer, files=summaries, options=options)
    done, total = 0, sum(scan.num_rows for scan in scans)
    for result in results:
        done += collector.add(result)
        progress(done, total)
    report = collector.report(title).with_notes(*tokenize.notes(tokenizer_dir))
    if not report.rows_kept or 2 * report.rows_bad > report.rows_read:
        raise UserError(_too_many_bad(report))
    return report


def read_files(files: Sequence[Path], *, indexed: IndexedFormat | None) -> Iterator[Chunk]:
    """The rows of all files, in order; those of a tokenized prefix are lists of its fields."""
    for index, path in enumerate(files):
        yield from read_tokenized(path, indexed, file=index) if is_prefix(path) else read_chunks(path, file=index)


def kept_rows(report: DataReport, *, indexed: IndexedFormat | None) -> Iterator[str]:
    """`file:row` of each group of a data set, in order, found by reading its files again."""
    refused = {row for rejections in report.rejected.values() for row in rejections.rows}
    for chunk in read_files([Path(file.path) for file in report.files], indexed=indexed):
        yield from (report.where((chunk.file, number)) for number in chunk.numbers if (chunk.file, number) not in refused)


def _too_many_bad(report: DataReport) -> str:
    what, refused = "More than half of the rows are bad", report.rows_bad
    codes = [code for code in report.rejected if code not in DELIBERATE]
    if not report.rows_kept:
        what, refused, codes = "No pair is left", report.rows_rejected, list(report.rejected)
    worst = max(codes, key=lambda code: len(report.rejected[code].rows))
    return (
        f"{what}: {refused:,} of {counted(report.rows_read, 'row')} {'was' if refused == 1 else 'were'} rejected.\n"
        f"Most often: {worst} ({len(report.rejected[worst].rows):,}). {ADVICE[worst]}\n{report.table()}"
    )


class Collector:
    """Takes chunk results in order: drops duplicates, writes the rest, counts everything."""

    def __init__(self, writer: GroupWriter, *, files: tuple[FileSummary, ...], options: DataOptions) -> None:
        self._writer = writer
        self._files = files
        self._options = options
        self._rejected: dict[str, Rejections] = defaultdict(Rejections)
        self._marks: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._seen = SeenRows()
        self._tokens = TokenCounts()

    def add(self, result: ChunkResult) -> int:
        """Take one chunk's result; returns its row count. Raises `UserError` for its first bad row when strict."""
        keep = np.ones(len(result.numbers), dtype=bool)
        rejections = list(result.rejections)
        for position, (number, keys) in enumerate(zip(result.numbers, result.keys, strict=True)):
            if rejection := self._duplicate(result.file, number, keys):
                rejections.append(rejection)
                keep[position] = False
        for rejection in sorted(rejections, key=lambda rejection: rejection.number):
            self._reject(result.file, rejection)
        self._unused.update(result.unused_columns)
        for number, names in result.dropped_fields:
            self._count_dropped(result.file, number, sorted(names))
        marks = result.marks[keep]
        self._marks.update({name: int(np.count_nonzero(marks & mark)) for mark, (name, _) in MARK_NAMES.items()})
        groups = result.groups.select(keep)
        self._tokens.add(groups.lengths)
        self._writer.add(groups)
        return len(result.numbers) + len(result.rejections)

    def _duplicate(self, file: int, number: int, keys: Sequence[bytes]) -> Rejection | None:
        first = self._seen.first(keys, number * len(self._files) + file) if self._options.drop_duplicates else None
        if first is None:
            return None
        row, first_file = divmod(first, len(self._files))
        where = "" if first_file == file else f" of data file {first_file + 1}"
        return Rejection(number, "duplicate", f"the same as row {row}{where}")

    def _reject(self, file: int, rejection: Rejection) -> None:
        if self._options.strict:
            raise UserError(
                f"{self._files[file].path}:{rejection.number}: {rejection.code}: {rejection.detail}. "
                "Repair the row, or drop bad rows by leaving out --strict-data."
            )
        self._rejected[rejection.code].add((file, rejection.number), rejection.detail)

    def _count_dropped(self, file: int, number: int, names: Sequence[str]) -> None:
        if self._options.strict:
            raise UserError(
                f"{self._files[file].path}:{number}: the chat template leaves out {', '.join(names)} of the row's messages. "
                "Use a template that writes it (--apply-chat-template-kwargs), remove it, or leave out --strict-data."
            )
        self._dropped.update(names)

    def report(self, title: str) -> DataReport:
        """What became of the rows taken so far."""
        return DataReport(
            title=title,
            files=self._files,
            rows_kept=self._tokens.groups,
            rejected={code: self._rejected[code] for code in REASONS if code in self._rejected},
            marks=dict(self._marks),
            unused_columns=dict(sorted(self._unused.items())),
            dropped_fields=dict(sorted(self._dropped.items())),
            tokens=self._tokens.statistics(),
        )
