"""Chunks of raw rows -> token ids, in this process or in a pool of spawned ones.

Strategy: the parent reads and writes, workers parse, render and encode. At most a few chunks per worker are in flight,
so memory does not grow with the file; results are taken in order, so the bytes do not depend on the worker count.

Invariants: a worker's exception reaches the caller as it was raised; a worker that dies is a `UserError`.
"""

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from relax.data.columns import COLUMNS
from relax.data.dataset import GroupBlock
from relax.data.formats import read_group
from relax.data.limits import LimitedGroup, apply_limits
from relax.data.options import DataOptions
from relax.data.render import GroupEncoder, GroupIds
from relax.data.rows import Group, RowRejected, printable
from relax.data.scan import FileScan
from relax.data.sources import Chunk
from relax.data.template_guard import TemplateOverrun
from relax.data.tokenized import read_row
from relax.data.tokenizer import has_chat_template, load_tokenizer, reads_tools
from relax.data.tokenizer_file import tokenizer_notes
from relax.errors import UserError

CHUNKS_IN_FLIGHT = 4  # per worker
HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refused row: its number in the file, the reason's code, what is wrong."""

    number: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """The groups of one chunk, in order, and what was refused.

    numbers: row numbers [groups]; marks: uint8 [groups] (`limits.Mark`); keys: what makes a row a duplicate (its ids before any
    limit and what is said of them, its id where one was asked for); dropped_fields: (row number, message fields that the chat
    template left out).
    """

    file: int
    groups: GroupBlock
    numbers: list[int]
    marks: np.ndarray
    keys: list[list[bytes]]
    rejections: list[Rejection]
    unused_columns: dict[str, int]
    dropped_fields: list[tuple[int, frozenset[str]]] = field(default_factory=list)


class _ReadRow(NamedTuple):
    """A row as token ids, before any limit."""

    number: int
    ids: GroupIds
    ranks: tuple[int, ...] = ()
    columns: Mapping[str, float] = MappingProxyType({})
    pair_id: str | None = None


class ChunkTokenizer:
    """Turns chunks into results, with one tokenizer. Building it runs the self-check and may raise `UserError`."""

    def __init__(self, tokenizer: Any, *, scans: Sequence[FileScan], options: DataOptions) -> None:
        raw = not all(scan.tokenized for scan in scans)
        try:
            self._encoder = GroupEncoder(tokenizer, options=options) if raw else None
        except TemplateOverrun as overrun:
            raise UserError(f"The self-check of the chat template: {overrun}.") from None
        self._tokenizer = tokenizer
        self._scans = scans
        self._options = options
        self._unread = _unread_parts(tokenizer, options)
        self._columns = [column.name for column in COLUMNS.values() if column.always or column.name in options.reads]

    def notes(self, tokenizer_dir: Path) -> tuple[str, ...]:
        """What the user should know of the tokenizer, which is that of `tokenizer_dir`. Raises `UserError`."""
        end_id = None if self._encoder is None else self._encoder.end_id
        return tokenizer_notes(self._tokenizer, tokenizer_dir, end_id=None if self._options.whole_render else end_id)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        rejections: list[Rejection] = []
        unused: Counter[str] = Counter()
        tokenized = self._scans[chunk.file].tokenized
        rows = _read_ids(chunk, rejections) if tokenized else self._encode(chunk, rejections, unused)
        kept: list[tuple[_ReadRow, LimitedGroup]] = []
        for row in rows:
            try:
                kept.append((row, apply_limits(row.ids, options=self._options)))
            except RowRejected as rejection:
                rejections.append(Rejection(row.number, rejection.code, rejection.detail))
        dropped = [(row.number, row.ids.dropped) for row, _ in kept if row.ids.dropped]
        result = _result(chunk.file, kept, read=self._columns, rejections=rejections, unused=unused)
        return replace(result, dropped_fields=dropped)

    def _encode(self, chunk: Chunk, rejections: list[Rejection], unused: Counter[str]) -> Iterator[_ReadRow]:
        """The rows that can be read and rendered; the others are added to `rejections`, overlooked columns to `unused`."""
        scan = self._scans[chunk.file]
        read: list[tuple[int, Group]] = []
        for number, row in zip(chunk.numbers, chunk.rows(), strict=True):
            try:
                read.append((number, read_group(row, name=scan.format, columns=scan.columns, options=self._options)))
            except RowRejected as rejection:
                rejections.append(Rejection(number, rejection.code, rejection.detail))
                scan.columns.used.update(scan.columns.names.values())  # what it would have read, nobody knows
            if isinstance(row, dict):
                unused.update(map(printable, scan.columns.unused(row, unread=self._unread)))
        for (number, group), ids in zip(read, self._encode_groups(read, path=scan.path), strict=True):
            if isinstance(ids, RowRejected):
                rejections.append(Rejection(number, ids.code, ids.detail))
            else:
                yield _ReadRow(number, ids, group.ranks, group.columns, group.pair_id)

    def _encode_groups(self, read: Sequence[tuple[int, Group]], *, path: str) -> list[GroupIds | RowRejected]:
        """The ids of numbered rows. Raises `UserError` naming the row with which the template does not end."""
        assert self._encoder is not None
        try:
            return self._encoder.encode([group for _, group in read])
        except TemplateOverrun as overrun:
            if len(read) > 1:  # which one was it? The others take no time
                return [self._encode_groups([row], path=path)[0] for row in read]
            raise UserError(f"{path}:{read[0][0]}: {overrun}. Repair the template, or leave the row out.") from None


def _unread_parts(tokenizer: Any, options: DataOptions) -> list[str]:
    """The parts that every row's reader takes and then nothing reads."""
    read = {
        "tools": options.chat_template and reads_tools(tokenizer, options.template_kwargs),
        "chat_template_kwargs": options.chat_template and has_chat_template(tokenizer, options.template_kwargs),
        **{column.name: column.name in options.reads for column in COLUMNS.values() if column.always},
    }
    return [part for part, is_read in read.items() if not is_read]


def _read_ids(chunk: Chunk, rejections: list[Rejection]) -> Iterator[_ReadRow]:
    """The rows of a tokenized file that hold a pair; the others are added to `rejections`."""
    for number, row in zip(chunk.numbers, chunk.rows(), strict=True):
        try:
            yield _ReadRow(number, read_row(row))
        except RowRejected as rejection:
            rejections.append(Rejection(number, rejection.code, rejection.detail))


def _result(
    file: int,
    kept: list[tuple[_ReadRow, LimitedGroup]],
    *,
    read: Sequence[str],
    rejections: list[Rejection],
    unused: Counter[str],
) -> ChunkResult:
    rows = [[group.prompt, *group.completions] for _, group in kept]
    width = max(map(len, rows), default=3)
    hashes = b"".join(group_hash(group.prompt, group.completions) for _, group in kept)
    ranks = [row.ranks or range(1, len(group.completions) + 1) for row, group in kept]
    groups = GroupBlock(
        tokens=np.concatenate([part for row in rows for part in row]) if rows else np.empty(0, np.int32),
        lengths=_rectangle([tuple(map(len, row)) for row in rows], width),
        trained=_rectangle([group.trained for _, group in kept], width - 1),
        hashes=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
        ranks=_rectangle(ranks, width - 1) if any(row.ranks for row, _ in kept) else None,
        columns={name: np.array([row.columns.get(name, np.nan) for row, _ in kept], np.float32) for name in read},
    )
    return ChunkResult(
        file=file,
        groups=groups,
        numbers=[row.number for row, _ in kept],
        marks=np.array([ids.marks for _, ids in kept], np.uint8),
        keys=[_keys(row) for row, _ in kept],
        rejections=rejections,
        unused_columns=dict(unused),
    )


def _rectangle(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """int32 [rows, width], 0 where a row is shorter."""
    return np.array([(*row, *[0] * (width - len(row))) for row in rows], np.int32).reshape(-1, width)


def _keys(row: _ReadRow) -> list[bytes]:
    said = [*row.ranks, *(number for name, number in row.columns.items() if COLUMNS[name].single)]
    keys = [group_hash(row.ids.prompt, row.ids.completions) + np.array(said, "<f8").tobytes()]
    if row.pair_id is not None:
        keys.append(b"id " + row.pair_id.encode(errors="surrogatepass"))
    return keys


def group_hash(prompt: np.ndarray, completions: Sequence[np.ndarray]) -> bytes:
    """blake2b-128 of a group's token ids; the lengths go first, so that no two splits of the same ids agree."""
    parts = (prompt, *completions)
    digest = blake2b(np.array([len(ids) for ids in parts], "<i4").tobytes(), digest_size=HASH_BYTES)
    for ids in parts:
        digest.update(np.ascontiguousarray(ids, "<i4").data)
    return digest.digest()


def tokenize_chunks(
    chunks: Iterable[Chunk],
    tokenize: ChunkTokenizer,
    *,
    tokenizer_dir: Path,
    scans: Sequence[FileScan],
    options: DataOptions,
    num_workers: int,
) -> Iterator[ChunkResult]:
    """The results of `chunks`, in order. Up to one worker means this process, with `tokenize`; others make their own."""
    if num_workers <= 1:
        yield from map(tokenize, chunks)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_dir, scans, options),
    )
    try:
        yield from _in_order(pool, chunks, limit=CHUNKS_IN_FLIGHT * num_workers)
    except BrokenProcessPool:
        raise UserError(
            "A tokenizing process died, most likely for lack of memory. Use a smaller --num-workers, or 1."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[Chunk], *, limit: int) -> Iterator[ChunkResult]:
    pending: deque[Future[ChunkResult]] = deque()
    for chunk in chunks:
        if len(pending) == limit:
            yield pending.popleft().result()
        pending.append(pool.submit(_run_in_worker, chunk))
    while pending:
        yield pending.popleft().result()


_worker: ChunkTokenizer | None = None


def _start_worker(tokenizer_dir: Path, scans: Sequence[FileScan], options: DataOptions) -> None:
    global _worker
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core: the pool is the parallelism
    _worker = ChunkTokenizer(load_tokenizer(tokenizer_dir), scans=scans, options=options)


def _end_with_parent() -> None:
    """A parent that was killed never tells its workers to end: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(chunk: Chunk) -> ChunkResult:
    assert _worker is not None
    return _worker(chunk)
