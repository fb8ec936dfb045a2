"""From groups in a micro-batch to tensors: token rows, positions, attention blocks and the rows to score.

A group, a prompt with its completions (a pair: two), becomes `prompt completion prompt completion ...`, or `prompt completion
completion ...` where the plan shares its prompt; each completion after the first then attends to the prompt and itself alone,
and its positions restart after the prompt. `prompt completion` is one plain causal block either way. Padding rows (to a length
that the parallel layout divides) form a block of their own that nothing scores. Under context parallelism rank r holds
chunks r and 2*size-1-r of the pack (zig-zag, so that causal work balances) and the key ranges still count in whole-pack rows.

Invariants: every completion token is a target exactly once over the context-parallel ranks; scores come in the order of the
sequences (group 0's completions, group 1's, ...); a query sees exactly its own sequence up to itself.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams


class Group(Protocol):
    """What the layout reads of a group: token ids of its prompt and of each completion, int [tokens] each."""

    @property
    def prompt(self) -> np.ndarray: ...
    @property
    def completions(self) -> Sequence[np.ndarray]: ...


# lengths of a group's completions -> what each of their tokens' log-probabilities counts, fp32 [tokens] each
TokenWeights = Callable[[Sequence[int]], list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows [q0, q1) attend to the key ranges, concatenated, causally from the bottom right."""

    q0: int
    q1: int
    keys: tuple[tuple[int, int], ...]

    @property
    def num_keys(self) -> int:
        return sum(k1 - k0 for k0, k1 in self.keys)

    @property
    def is_square(self) -> bool:
        return self.num_keys == self.q1 - self.q0

    def take_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., pack rows, head_dim] -> this block's key rows, in order."""
        parts = [rows[..., k0:k1, :] for k0, k1 in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def add_to_keys(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        """Add part [..., keys, head_dim], for this block's first keys, to the pack's rows [..., rows, head_dim]."""
        first = 0
        for k0, k1 in self.keys:
            size = min(k1 - k0, part.size(-2) - first)
            rows[..., k0 : k0 + size, :].add_(part[..., first : first + size, :])
            first += size


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """All blocks as one call of a variable-length attention kernel, causal from the bottom right of each.

    key_rows [keys]: the pack's row of each key, block after block, None where they are all rows in order; query_ends,
    key_ends int32 [blocks + 1]: where each block's queries and keys begin and end; the longest of each.
    """

    key_rows: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    max_queries: int
    max_keys: int


@dataclass
class PackedLayout(PackedSeqParams):
    """One rank's micro-batch. `qkv_format` stays "sbhd" so that attention keeps [rows, 1, heads, head_dim].

    ids, positions [rows]; score_rows [num_targets]: the local rows whose output is scored; weights [num_targets]: what each
    target's log-probability counts in its sequence's score, None where 1; targets [num_targets]: the token
    each predicts (lm head); target_counts [num_sequences]: how many of them belong to each sequence, in order; real [rows]:
    a group's token, not padding.
    """

    ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    score_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    targets: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    target_counts: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    weights: torch.Tensor | None = None
    real: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    blocks: tuple[Block, ...] = ()
    num_groups: int = 0
    gathered_order: torch.Tensor | None = None  # context parallel: where each whole-pack row lies among the gathered rows
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    call: VarlenCall | None = None
    rotation: tuple[torch.Tensor, ...] = ()  # the model's: cosine and sine of each row's angles, [rows, 1, 1, head_dim / 2]

    def to(self, device: torch.device) -> Self:
        """This layout with its tensors on `device`; itself where they are there."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        return self

    def mask(self, block: Block, device: torch.device) -> torch.Tensor | None:
        """The block's bottom-right causal mask [queries, keys], made once for all layers; None where it is a plain square."""
        if block.is_square:
            return None
        shape = (block.q1 - block.q0, block.num_keys)
        if shape not in self.masks:
            self.masks[shape] = torch.ones(shape, dtype=torch.bool, device=device).tril(shape[1] - shape[0])
        return self.masks[shape]

    def varlen_call(self) -> VarlenCall:
        """The blocks as one call, made once for all layers; they cover the rows in order."""
        if self.call is None:
            device, queries = self.ids.device, [block.q1 - block.q0 for block in self.blocks]
            keys = [block.num_keys for block in self.blocks]
            rows = np.concatenate([np.arange(k0, k1) for block in self.blocks for k0, k1 in block.keys])
            plain = np.array_equal(rows, np.arange(self.ids.size(0))) and self.gathered_order is None
            ends = [torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32) for sizes in (queries, keys)]
            self.call = VarlenCall(
                key_rows=None if plain else torch.from_numpy(rows).to(device),
                query_ends=ends[0].to(device),
                key_ends=ends[1].to(device),
                max_queries=max(queries),
                max_keys=max(keys),
            )
        return self.call


@dataclass
class _Pack:
    """The whole pack, before it is divided over context-parallel ranks."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    segments: list[tuple[int, int, tuple[tuple[int, int], ...]]] = field(default_factory=list)  # first, end, earlier keys
    score_rows: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    rows: int = 0

    def add(self, ids: np.ndarray, *, position: int = 0, after: tuple[tuple[int, int], ...] = ()) -> int:
        """Append a run of tokens that attends to the ranges `after` and causally to itself; returns its first row."""
        first = self.rows
        self.ids.append(ids)
        self.positions.append(np.arange(position, position + len(ids)))
        self.segments.append((first, first + len(ids), after))
        self.rows += len(ids)
        return first

    def score(self, rows: np.ndarray, targets: np.ndarray) -> None:
        self.score_rows.append(rows)
        self.targets.append(targets)


def build_layout(
    groups: Sequence[Group],
    shared: Sequence[bool],
    *,
    head: Literal["lm", "scalar"],
    device: torch.device,
    token_weights: TokenWeights | None = None,
    multiple: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> PackedLayout:
    """Lay out whole groups for one context-parallel rank; no groups give the shortest pack of padding.

    shared [num_groups]: prompt laid out once; multiple: what the number of rows per rank must divide by (tensor-parallel size
    under sequence parallelism).
    """
    pack = _Pack()
    for group, share in zip(groups, shared, strict=True):
        prompt_row: int | None = None
        if token_weights:
            pack.weights += token_weights([len(completion) for completion in group.completions])
        for completion in group.completions:
            first = _add_completion(pack, group.prompt, completion, head=head, prompt_row=prompt_row)
            prompt_row = first if share else None
    step = multiple * (2 * cp_size if cp_size > 1 else 1)
    real = pack.rows
    padding = -pack.rows % step if pack.rows else max(step, 1)
    if padding:
        pack.add(np.zeros(padding, dtype=np.int64))
    return _shard(pack, real=real, num_groups=len(groups), device=device, rank=cp_rank, size=cp_size)


def _add_completion(
    pack: _Pack, prompt: np.ndarray, completion: np.ndarray, *, head: str, prompt_row: int | None = None
) -> int:
    """Append a completion after its prompt, or after the one that lies at `prompt_row`; returns the prompt's first row."""
    size, length = len(prompt), len(completion)
    if prompt_row is None:
        prompt_row = pack.add(np.concatenate((prompt, completion)))
        first = prompt_row + size
    else:
        first = pack.add(completion, position=size, after=((prompt_row, prompt_row + size),))
    if head == "scalar":
        pack.score(np.array([first + length - 1]), completion[-1:])
    else:  # the prompt's last row predicts the completion's first token
        pack.score(np.concatenate(([prompt_row + size - 1], np.arange(first, first + length - 1))), completion)
    return prompt_row


def _shard(pack: _Pack, *, real: int, num_groups: int, device: torch.device, rank: int, size: int) -> PackedLayout:
    chunk = pack.rows // (2 * size) if size > 1 else pack.rows
    owned = [_owned(r, size=size, chunk=chunk) for r in range(size)]
    blocks, base = [], 0
    for a, b in owned[rank]:
        for first, end, after in pack.segments:
            x, y = max(a, first), min(b, end)
            if x < y:
                blocks.append(Block(base + x - a, base + y - a, (*after, (first, y))))
        base += b - a
    rows = np.concatenate([np.arange(a, b) for a, b in owned[rank]])
    local = np.full(pack.rows, -1)
    local[rows] = np.arange(len(rows))
    score_rows = [local[r] for r in pack.score_rows]
    kept = [r >= 0 for r in score_rows]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

    def joined(parts: list[np.ndarray]) -> torch.Tensor:
        return tensor(np.concatenate(parts) if parts else np.empty(0))

    weights = [w[k].astype(np.float32) for w, k in zip(pack.weights, kept, strict=True)] if pack.weights else []

    gathered = np.concatenate([np.arange(a, b) for ranges in owned for a, b in ranges])
    return PackedLayout(
        qkv_format="sbhd",
        max_seqlen_q=len(rows),
        max_seqlen_kv=len(rows),
        ids=tensor(np.concatenate(pack.ids)[rows]),
        positions=tensor(np.concatenate(pack.positions)[rows]),
        blocks=tuple(blocks),
        num_groups=num_groups,
        score_rows=joined([r[k] for r, k in zip(score_rows, kept, strict=True)]),
        targets=joined([t[k] for t, k in zip(pack.targets, kept, strict=True)]),
        target_counts=tensor(np.array([k.sum() for k in kept])),
        weights=torch.from_numpy(np.concatenate(weights)).to(device) if weights else None,
        real=torch.from_numpy(rows < real).to(device),
        gathered_order=tensor(np.argsort(gathered)) if size > 1 else None,
    )


def _owned(rank: int, *, size: int, chunk: int) -> list[tuple[int, int]]:
    """The whole-pack row ranges of a context-parallel rank."""
    if size == 1:
        return [(0, chunk)]
    return [(rank * chunk, (rank + 1) * chunk), ((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)]
