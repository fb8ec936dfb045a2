"""Chunks of raw rows -> token ids, in this process or in a pool of spawned ones.

Strategy: the parent reads and writes, workers parse, render and encode. At most a few chunks per worker are in flight,
so memory does not grow with the file; results are taken in order, so the bytes do not depend on the worker count.

Invariants: a worker's exception reaches the caller as it was raised; a worker that dies is a `UserError`.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax.data.formats import read_pair
from relax.data.limits import LimitedPair, apply_limits
from relax.data.options import DataOptions
from relax.data.render import PairEncoder
from relax.data.rows import PreferencePair, RowRejected
from relax.data.scan import FileScan
from relax.data.sources import Chunk
from relax.data.tokenizer import load_tokenizer, reads_tools
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
    """The pairs of one chunk, in order, and what was refused.

    tokens: int32 [sum of lengths], each pair as prompt, chosen, rejected; lengths: int32 [pairs, 3];
    numbers: row numbers [pairs]; marks: uint8 [pairs] (`limits.Mark`); margins: float32 [pairs], NaN where none;
    hashes: uint8 [pairs, 16]; keys: what makes a pair a duplicate (its content, its id where one was asked for).
    """

    file: int
    tokens: np.ndarray
    lengths: np.ndarray
    numbers: list[int]
    marks: np.ndarray
    margins: np.ndarray
    hashes: np.ndarray
    keys: list[tuple[bytes, str | None]]
    rejections: list[Rejection]
    unused_columns: dict[str, int]


class _ReadRow(NamedTuple):
    number: int
    pair: PreferencePair
    key: bytes


class ChunkTokenizer:
    """Turns chunks into results, with one tokenizer. Building it runs the self-check and may raise `UserError`."""

    def __init__(self, tokenizer: Any, *, scans: Sequence[FileScan], options: DataOptions) -> None:
        self._encoder = PairEncoder(tokenizer, options=options)
        self._scans = scans
        self._options = options
        self._reads_tools = reads_tools(tokenizer, options.template_kwargs)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        scan = self._scans[chunk.file]
        rejections: list[Rejection] = []
        rows: list[_ReadRow] = []
        unused: dict[str, int] = {}
        consumed = scan.consumed_columns(tools=self._reads_tools, margins=self._options.whole_render)
        for number, row in zip(chunk.numbers, chunk.rows(), strict=True):
            try:
                pair = read_pair(row, name=scan.format, columns=scan.columns, options=self._options)
                rows.append(_ReadRow(number, pair, pair.content_key()))
            except RowRejected as rejection:
                rejections.append(Rejection(number, rejection.code, rejection.detail))
            if isinstance(row, dict):
                for name in row.keys() - consumed:
                    if row[name] not in (None, "", [], {}):
                        unused[name] = unused.get(name, 0) + 1
        kept: list[tuple[_ReadRow, LimitedPair]] = []
        for read, ids in zip(rows, self._encoder.encode([read.pair for read in rows]), strict=True):
            try:
                if isinstance(ids, RowRejected):
                    raise ids
                kept.append((read, apply_limits(ids, options=self._options)))
            except RowRejected as rejection:
                rejections.append(Rejection(read.number, rejection.code, rejection.detail))
        return _result(chunk.file, kept, rejections=rejections, unused=unused)


def _result(
    file: int,
    kept: list[tuple[_ReadRow, LimitedPair]],
    *,
    rejections: list[Rejection],
    unused: dict[str, int],
) -> ChunkResult:
    parts = [part for _, ids in kept for part in (ids.prompt, ids.chosen, ids.rejected)]
    hashes = b"".join(pair_hash(ids.prompt, ids.chosen, ids.rejected) for _, ids in kept)
    margins = [np.nan if read.pair.margin is None else read.pair.margin for read, _ in kept]
    return ChunkResult(
        file=file,
        tokens=np.concatenate(parts) if parts else np.empty(0, np.int32),
        lengths=np.array([len(part) for part in parts], np.int32).reshape(-1, 3),
        numbers=[read.number for read, _ in kept],
        marks=np.array([ids.marks for _, ids in kept], np.uint8),
        margins=np.array(margins, np.float32),
        hashes=np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES),
        keys=[(read.key, read.pair.pair_id) for read, _ in kept],
        rejections=rejections,
        unused_columns=unused,
    )


def pair_hash(prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> bytes:
    """blake2b-128 of a pair's token ids; the lengths go first, so that no two splits of the same ids agree."""
    digest = blake2b(np.array([len(prompt), len(chosen), len(rejected)], "<i4").tobytes(), digest_size=HASH_BYTES)
    for ids in (prompt, chosen, rejected):
        digest.update(np.ascontiguousarray(ids, "<i4").data)
    return digest.digest()


def tokenize_chunks(
    chunks: Iterable[Chunk],
    *,
    tokenizer: Any,
    tokenizer_dir: Path,
    scans: Sequence[FileScan],
    options: DataOptions,
    num_workers: int,
) -> Iterator[ChunkResult]:
    """The results of `chunks`, in order. Up to one worker means this process, with `tokenizer`."""
    if num_workers <= 1:
        yield from map(ChunkTokenizer(tokenizer, scans=scans, options=options), chunks)
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core: the pool is the parallelism
    _worker = ChunkTokenizer(load_tokenizer(tokenizer_dir), scans=scans, options=options)


def _run_in_worker(chunk: Chunk) -> ChunkResult:
    assert _worker is not None
    return _worker(chunk)
