"""Attention over blocks on a CPU by batched products (Dao et al. 2022, Algorithms 1 and 4, with whole rows of scores).

A block's queries go a few at a time, each time with the keys that the last of them sees; the heads that share keys are rows of
one product. What keys get from several calls in backward is added into one buffer: autograd would make a pack-sized gradient
for every slice. torch's own kernel computes a causal call whole up to 512 keys, takes a call for each block, and is several
times slower in backward.

Invariants: equal to softmax attention over each block's keys, values and gradients; what is kept for backward is in the
inputs' dtype but for one number per row and head. Scores, softmax and what calls add up are fp32 (fp64 for fp64 input); in
bf16 probabilities, and what a call contributes, are rounded once, which leaves half the error of torch's kernel.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from relax.backend.model.layout import Block, PackedLayout
from relax.backend.ops.cpu.passes import Passes
from relax.backend.ops.cpu.products import cpu_multiplies_bf16, products_of, scratch

QUERIES = 128  # of a call: fewer leave less work for nothing, more make larger products
SCORES = 1 << 25  # of a call, over heads: it bounds memory where keys are many


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float, *, passes: Passes
) -> torch.Tensor:
    """`Ops.attention`, by these passes between its products."""
    result: torch.Tensor = _Attention.apply(query, key, value, layout.blocks, scale, passes)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[Block, ...],
        scale: float,
        passes: Passes,
    ) -> torch.Tensor:
        groups, (wide, narrow) = key.size(1), _dtypes(query.dtype)
        by_group = passes.by_group
        q, k, v = by_group(query, groups, wide), by_group(key, groups, wide), by_group(value, groups, narrow)
        result = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(query.shape[:2], dtype=wide)
        for block in blocks:
            keys, values = block.take_keys(k), block.take_keys(v)
            for rows, own, seen in _calls(block, query.size(1), groups):
                (scores,), (p,) = _memory(1, q[:, own], seen, narrow)
                _multiply_exactly(q[:, own], keys[:, :seen], narrow, out=scores)
                passes.to_probabilities(scores, p, logsumexp, rows, scale)
                passes.from_groups(torch.bmm(p, values[:, :seen]), result[rows])
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.blocks, ctx.scale, ctx.passes = blocks, scale, passes
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        groups, passes, (wide, narrow) = key.size(1), ctx.passes, _dtypes(query.dtype)
        q, k, v, g = (passes.by_group(x, groups, wide) for x in (query, key, value, grad))
        q_, k_, g_ = (x if wide == narrow else x.to(narrow) for x in (q, k, g))
        delta = passes.row_products(grad, result, wide)
        grad_q, grad_k, grad_v = torch.empty(query.shape, dtype=query.dtype), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            keys, keys_, values = (block.take_keys(x) for x in (k, k_, v))
            for rows, own, seen in _calls(block, query.size(1), groups):
                (scores, along), (p, ds) = _memory(2, q[:, own], seen, narrow)
                _multiply_exactly(q[:, own], keys[:, :seen], narrow, out=scores)
                _multiply_exactly(g[:, own], values[:, :seen], narrow, out=along)
                passes.to_gradients(scores, along, p, ds, logsumexp, delta, rows, ctx.scale)
                block.add_to_keys(grad_v, torch.bmm(p.transpose(1, 2), g_[:, own]))
                block.add_to_keys(grad_k, torch.bmm(ds.transpose(1, 2), q_[:, own]))
                passes.from_groups(torch.bmm(ds, keys_[:, :seen]), grad_q[rows])
        return grad_q, grad_k.transpose(0, 1).to(key.dtype), grad_v.transpose(0, 1).to(value.dtype), None, None, None


def _dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What scores, sums and gradients of keys have, and what products of probabilities take, for inputs of `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide, dtype if cpu_multiplies_bf16() else wide


def _multiply_exactly(rows: torch.Tensor, keys: torch.Tensor, narrow: torch.dtype, *, out: torch.Tensor) -> None:
    """rows times the transpose of keys, for each group; both hold values of `narrow` in a wider dtype, which out has."""
    with products_of(narrow):
        torch.bmm(rows, keys.transpose(1, 2), out=out)


def _calls(block: Block, heads: int, groups: int) -> Iterator[tuple[slice, slice, int]]:
    """Query rows, where they are among a group's rows * heads, and how many of the block's keys the last of them sees."""
    size, few = block.q1 - block.q0, SCORES // (heads * block.num_keys)
    count = max(1, round(size / max(1, min(QUERIES, few))))
    for i in range(count):
        q0, q1 = (block.q0 + size * j // count for j in (i, i + 1))
        yield slice(q0, q1), slice(q0 * heads // groups, q1 * heads // groups), block.num_keys - (block.q1 - q1)


def _memory(number: int, q: torch.Tensor, keys: int, narrow: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Space for `number` matrices of q's rows by keys in each group, in q's dtype and in `narrow`, the same where that is the
    same; every call uses it again."""
    shape = (number, *q.shape[:2], keys)
    wide, own = (scratch("attention", math.prod(shape), dtype).view(shape) for dtype in (q.dtype, narrow))
    return wide, own
