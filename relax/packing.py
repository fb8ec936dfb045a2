"""Lengths to a step plan: which rank runs which pairs, in which micro-batches. Pure numpy and Python.

Strategy. A pair shares its prompt between its two answers where that saves tokens by a useful ratio. Pairs are dealt to
ranks, largest first, each to the rank whose pairs cost least so far. Inside a rank, best fit decreasing finds how few
micro-batches hold the pairs; the neediest rank sets the count for all, and every rank spreads its pairs evenly over it.

Invariants:
- Every pair of the step stands in exactly one micro-batch, whole.
- A micro-batch holds at most `max_tokens` laid-out tokens, except a pair that is larger by itself, which runs alone.
- Every rank has the same number of micro-batches, at least one, a multiple of `microbatch_multiple`; where pairs run
  out, the rest are empty.
- Where every pair takes at most 1/q of the budget, up to q micro-batches are at most one more than
  ceil(largest rank's tokens / max_tokens), before rounding to the multiple.
- Inside a rank, micro-batches come largest first, so that memory peaks at once and ranks in step do like work.
- The plan is a function of its arguments, and sharing a function of the pair's own lengths, never of its neighbours.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Sharing costs some bookkeeping per pair and layer: on a CPU a model that is 48 wide loses 2% at a ratio of 1.035. From 1.1 on
# it pays there too.
MIN_SHARING_GAIN = 1.1

Bins = list[list[int]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass: positions in the step's list of pairs, ascending, `()` for an empty one.

    `shared[i]` says whether the prompt of `pairs[i]` is laid out once for both answers.
    """

    pairs: tuple[int, ...] = ()
    shared: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Micro-batches by rank, `[dp_size][num_microbatches]`."""

    ranks: tuple[tuple[MicroBatch, ...], ...]


def shares_prompt(lengths: np.ndarray) -> np.ndarray:
    """Whether each pair's prompt is worth sharing, bool `[num_pairs]`: (2P + C + R) / (P + C + R) reaches the minimum.

    `lengths` is int `[num_pairs, 3]`: prompt, chosen and rejected tokens.
    """
    prompt, once = lengths[:, 0], lengths.sum(axis=1)
    return (prompt > 0) & (once + prompt >= MIN_SHARING_GAIN * once)


def laid_out_tokens(lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Rows that each pair takes in a micro-batch, int `[num_pairs]`: P + C + R where shared, else 2P + C + R."""
    return lengths.sum(axis=1) + lengths[:, 0] * ~np.asarray(shared, dtype=bool)


def pair_costs(lengths: np.ndarray, shared: np.ndarray, *, area_cost: float) -> np.ndarray:
    """Time of each pair in units of one token's dense layers, float `[num_pairs]`.

    `area_cost` is the price of one query-key entry of causal attention in that unit: with 12 h^2 parameters in a layer
    of width h it is 4 h / 24 h^2 = 1 / (6 h).
    """
    prompt = lengths[:, 0].astype(np.float64)
    answers = lengths[:, 1:].astype(np.float64)
    area = (answers * (answers + 1) / 2 + answers * prompt[:, None]).sum(axis=1)
    area += np.where(shared, 1, 2) * prompt * (prompt + 1) / 2
    return laid_out_tokens(lengths, shared) + area_cost * area


def plan_step(
    lengths: np.ndarray,
    *,
    dp_size: int = 1,
    max_tokens: int,
    share_prompt: bool = True,
    microbatch_multiple: int = 1,
    area_cost: float = 1 / 6144,
) -> StepPlan:
    """Plan one step over `lengths`, int `[num_pairs, 3]` (prompt, chosen, rejected tokens), for `dp_size` ranks.

    `max_tokens` is the budget of a micro-batch in laid-out tokens. `area_cost` is as in `pair_costs`; its default suits
    hidden size 1024. Raises ValueError for lengths or counts that make no sense.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 2 or lengths.shape[1] != 3 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"lengths must be integers of shape [num_pairs, 3], got {lengths.dtype} {lengths.shape}")
    if (lengths < 0).any():
        raise ValueError(f"lengths must not be negative, got {lengths.min()}")
    if min(dp_size, max_tokens, microbatch_multiple) < 1:
        raise ValueError(f"{dp_size=}, {max_tokens=} and {microbatch_multiple=} must each be at least 1")
    shared = shares_prompt(lengths) if share_prompt else np.zeros(len(lengths), dtype=bool)
    laid_out = laid_out_tokens(lengths, shared)
    order, tokens = np.argsort(-laid_out, kind="stable").tolist(), laid_out.tolist()
    ranks, _ = _deal(order, pair_costs(lengths, shared, area_cost=area_cost).tolist(), dp_size)
    packed = [_best_fit(pairs, tokens, max_tokens) for pairs in ranks]
    needed = max(1, *map(len, packed))
    count = -(-needed // microbatch_multiple) * microbatch_multiple
    flags = shared.tolist()
    plan = []
    for pairs, tight in zip(ranks, packed, strict=True):
        packs = _largest_first(_spread(pairs, tokens, count, max_tokens) or tight, tokens)
        full = tuple(MicroBatch(tuple(pack), tuple([flags[pair] for pair in pack])) for pack in packs)
        plan.append(full + (MicroBatch(),) * (count - len(full)))
    return StepPlan(tuple(plan))


def _deal(pairs: Sequence[int], sizes: Sequence[float], count: int) -> tuple[Bins, list[float]]:
    """Each pair in turn to the bin with the least so far; the bins and their loads."""
    bins: Bins = [[] for _ in range(count)]
    loads = [0.0] * count
    heap = [(0.0, index) for index in range(count)]
    for pair in pairs:
        load, index = heap[0]
        bins[index].append(pair)
        loads[index] = load + sizes[pair]
        heapq.heapreplace(heap, (loads[index], index))
    return bins, loads


def _best_fit(pairs: Sequence[int], tokens: Sequence[int], max_tokens: int) -> Bins:
    """Few micro-batches within the budget: each pair, largest first, into the fullest that still holds it."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for pair in pairs:
        size = tokens[pair]
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            room, index = max_tokens, len(bins)
            bins.append([])
        else:
            room, index = rooms.pop(at)
        bins[index].append(pair)
        insort(rooms, (room - size, index))
    return bins


def _spread(pairs: Sequence[int], tokens: Sequence[int], count: int, max_tokens: int) -> Bins | None:
    """The pairs, largest first, over `count` micro-batches of near-equal size; None where that breaks the budget."""
    if count == 1:
        return [list(pairs)]
    bins, loads = _deal(pairs, tokens, count)
    fits = all(load <= max_tokens or len(pack) == 1 for pack, load in zip(bins, loads, strict=True))
    return bins if fits else None


def _largest_first(bins: Bins, tokens: Sequence[int]) -> Bins:
    """Non-empty bins by laid-out tokens, descending, each in ascending order of its pairs."""
    packs = [sorted(pack) for pack in bins if pack]
    return sorted(packs, key=lambda pack: -sum([tokens[pair] for pair in pack])) if len(packs) > 1 else packs
