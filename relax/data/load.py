"""Data files -> `PairDataset`: from the cache where these very pairs were tokenized before, else through the pipeline.

files -> scan (format, columns, broken lines) -> chunks -> workers (rows, render, encode, limits) -> duplicates out ->
cache entry -> memory map.

Invariants: the result depends on file contents, tokenizer and options alone; the bytes are the same for any number of
workers; memory is bounded by a few chunks per worker plus some hundred bytes a pair.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from relax.data.dataset import EntryWriter, PairDataset, cache_failure, is_complete
from relax.data.fingerprint import cache_key
from relax.data.options import DataOptions
from relax.data.render import PairEncoder
from relax.data.report import MARK_NAMES, DataReport, FileSummary, Rejections, counted, token_statistics
from relax.data.rows import DELIBERATE, REASONS
from relax.data.scan import scan_file
from relax.data.sources import Chunk, expand_paths, read_chunks
from relax.data.tokenizer import load_tokenizer
from relax.data.worker import ChunkResult, Rejection, tokenize_chunks
from relax.errors import UserError

# Below this many rows a pool costs more than it saves: each spawned process imports and loads the tokenizer first.
MIN_ROWS_FOR_POOL = 4096

# What to do where most rows are refused for a reason. A duplicate is never that: the row it repeats was kept.
ADVICE = {
    "schema": "Check the rows below; --prompt-key, --chosen-key, --rejected-key and --conversation-key-map name the columns.",
    "prompt_mismatch": "Give both sides the same history, or put it into a prompt column and leave only the answers there.",
    "identical": "Check that --chosen-key and --rejected-key name two different answers.",
    "post_truncation_identical": "The answers differ only behind --preference-max-completion-length: raise it.",
    "empty_completion": "Fill in the answers, or use a chat template that writes what they hold (tool calls, reasoning).",
    "oversize": "Raise --max-tokens-per-gpu, or choose another --sft-oversize-strategy.",
    "boundary": "The chat template rewrites the conversation once it is answered: use one that does not.",
}


def load_pairs(
    paths: Sequence[str],
    *,
    tokenizer_dir: Path | str,
    options: DataOptions,
    cache_dir: Path | str,
    num_workers: int,
    title: str,
) -> PairDataset:
    """Read, tokenize and cache the pairs of `paths`, in order; `title` names the set in the report.

    Raises `UserError` for files or tokenizers that cannot be used, for the first bad row under `options.strict`, and
    with the whole report when no row is left or more than half are bad, those dropped as asked not counted. Several
    processes may call it at once.
    """
    tokenizer_dir = Path(tokenizer_dir)
    files = expand_paths(paths)
    if not tokenizer_dir.is_dir():
        load_tokenizer(tokenizer_dir)  # says what is missing
    entry = Path(cache_dir) / cache_key(files, tokenizer_dir=tokenizer_dir, options=options)
    if not is_complete(entry):
        _tokenize(files, entry, tokenizer_dir=tokenizer_dir, options=options, num_workers=num_workers, title=title)
    return PairDataset.open(entry, paths=[str(file) for file in files], title=title)


def _tokenize(
    files: Sequence[Path],
    entry: Path,
    *,
    tokenizer_dir: Path,
    options: DataOptions,
    num_workers: int,
    title: str,
) -> None:
    scans = [scan_file(path, options=options) for path in files]
    num_rows = sum(scan.num_rows for scan in scans)
    tokenizer = load_tokenizer(tokenizer_dir)
    PairEncoder(tokenizer, options=options)  # the self-check, before any process starts
    results = tokenize_chunks(
        _chunks(files),
        tokenizer=tokenizer,
        tokenizer_dir=tokenizer_dir,
        scans=scans,
        options=options,
        num_workers=num_workers if num_rows >= MIN_ROWS_FOR_POOL else 1,
    )
    summaries = tuple(FileSummary(str(path), scan.format, scan.num_rows) for path, scan in zip(files, scans, strict=True))
    try:
        with (
            EntryWriter(entry) as writer,
            tqdm(total=num_rows, desc=f"tokenize {title}", unit="row", disable=None) as bar,
        ):
            collector = Collector(writer, files=summaries, options=options)
            for result in results:
                bar.update(collector.add(result))
            report = collector.report(title)
            if not report.rows_kept or 2 * report.rows_bad > report.rows_read:
                raise UserError(_too_many_bad(report))
            writer.publish(report.to_meta())
    except OSError as error:
        raise cache_failure(entry.parent, error) from error


def _chunks(files: Sequence[Path]) -> Iterator[Chunk]:
    for index, path in enumerate(files):
        yield from read_chunks(path, file=index)


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

    def __init__(self, writer: EntryWriter, *, files: tuple[FileSummary, ...], options: DataOptions) -> None:
        self._writer = writer
        self._files = files
        self._options = options
        self._rejected: dict[str, Rejections] = {}
        self._marks: Counter[str] = Counter()
        self._unused: Counter[str] = Counter()
        self._seen: dict[bytes | str, int] = {}  # a pair's content or id -> the row it first came in, as one number

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
        marks = result.marks[keep]
        self._marks.update({name: int(np.count_nonzero(marks & mark)) for mark, (name, _) in MARK_NAMES.items()})
        lengths = result.lengths[keep].astype(np.int64)
        tokens = result.tokens if keep.all() else result.tokens[np.repeat(keep, result.lengths.sum(axis=1))]
        self._writer.add(tokens, lengths=lengths, hashes=result.hashes[keep], margins=result.margins[keep])
        return len(result.numbers) + len(result.rejections)

    def _duplicate(self, file: int, number: int, keys: tuple[bytes, str | None]) -> Rejection | None:
        present = [key for key in keys if key is not None] if self._options.drop_duplicates else []
        first = next((self._seen[key] for key in present if key in self._seen), None)
        if first is None:
            self._seen.update(dict.fromkeys(present, number * len(self._files) + file))
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
        self._rejected.setdefault(rejection.code, Rejections()).add((file, rejection.number), rejection.detail)

    def report(self, title: str) -> DataReport:
        """What became of the rows taken so far."""
        lengths = self._writer.lengths
        return DataReport(
            title=title,
            files=self._files,
            rows_kept=len(lengths),
            rejected={code: self._rejected[code] for code in REASONS if code in self._rejected},
            marks=dict(self._marks),
            unused_columns=dict(sorted(self._unused.items())),
            tokens=token_statistics(lengths),
        )
