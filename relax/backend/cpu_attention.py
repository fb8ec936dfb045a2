"""Attention over blocks on a CPU by batched products (Dao et al. 2022, Algorithms 1 and 4, with whole rows of scores).

A block's queries go a few at a time, each time with the keys that the last of them sees; the heads that share keys are rows of
one product. What keys get from several calls in backward is added into one buffer: autograd would make a pack-sized gradient
for every slice. torch's own kernel computes a causal call whole up to 512 keys, takes a call for each block, and is several
times slower in backward.

Invariants: equal to softmax attention over each block's keys, values and gradients; what is kept for backward is in the
inputs' dtype but for one number per row and head. Scores, softmax and what calls add up are fp32 (fp64 for fp64 input); in
bf16 probabilities, and what a call contributes, are rounded once, which leaves half the error of torch's kernel.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from relax.backend.kernels import kernel
from relax.backend.layout import Block, PackedLayout
from relax.backend.products import cpu_multiplies_bf16, products_of, scratch

QUERIES = 128  # of a call: fewer leave less work for nothing, more make larger products
SCORES = 1 << 25  # of a call, over heads: it bounds memory where keys are many


def attend_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float
) -> torch.Tensor:
    """query [rows, heads, head_dim], key and value [keys, key heads, head_dim] -> [rows, heads, head_dim]."""
    result: torch.Tensor = _Attention.apply(query, key, value, layout.blocks, scale)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: tuple[Block, ...], scale: float
    ) -> torch.Tensor:
        groups, (wide, narrow) = key.size(1), _dtypes(query.dtype)
        q, k, v = _by_group(query, groups, wide), _by_group(key, groups, wide), _by_group(value, groups, narrow)
        result = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(query.shape[:2], dtype=wide)
        for block in blocks:
            keys, values = block.take_keys(k), block.take_keys(v)
            for rows, own, seen in _calls(block, query.size(1), groups):
                (scores,), (p,) = _memory(1, q[:, own], seen, narrow)
                _multiply_exactly(q[:, own], keys[:, :seen], narrow, out=scores)
                _to_probabilities(scores, p, logsumexp, rows, scale)
                _from_groups(torch.bmm(p, values[:, :seen]), result[rows])
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        groups, (wide, narrow) = key.size(1), _dtypes(query.dtype)
        q, k, v, g = (_by_group(x, groups, wide) for x in (query, key, value, grad))
        q_, k_, g_ = (x if wide == narrow else x.to(narrow) for x in (q, k, g))
        delta = _row_products(grad, result, wide)
        grad_q, grad_k, grad_v = torch.empty(query.shape, dtype=query.dtype), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            keys, keys_, values = (block.take_keys(x) for x in (k, k_, v))
            for rows, own, seen in _calls(block, query.size(1), groups):
                (scores, along), (p, ds) = _memory(2, q[:, own], seen, narrow)
                _multiply_exactly(q[:, own], keys[:, :seen], narrow, out=scores)
                _multiply_exactly(g[:, own], values[:, :seen], narrow, out=along)
                _to_gradients(scores, along, p, ds, logsumexp, delta, rows, ctx.scale)
                block.add_to_keys(grad_v, torch.bmm(p.transpose(1, 2), g_[:, own]))
                block.add_to_keys(grad_k, torch.bmm(ds.transpose(1, 2), q_[:, own]))
                _from_groups(torch.bmm(ds, keys_[:, :seen]), grad_q[rows])
        return grad_q, grad_k.transpose(0, 1).to(key.dtype), grad_v.transpose(0, 1).to(value.dtype), None, None


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


def _by_group(x: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, width] -> [groups, rows * heads of a group, width] in `dtype`."""
    rows, heads, width = x.shape
    if dtype == torch.float32 and (run := kernel("by_group", x)):
        out = torch.empty(groups, rows * (heads // groups), width)
        run(x.contiguous(), out, rows, groups, heads // groups * width)
        return out
    return x.to(dtype).unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)


def _from_groups(x: torch.Tensor, out: torch.Tensor) -> None:
    """[groups, rows * heads of a group, width] into out [rows, heads, width]."""
    rows, heads, width = out.shape
    groups = x.size(0)
    if x.dtype == torch.float32 and (run := kernel("from_groups", out)):
        return run(x, out, rows, groups, heads // groups * width)
    out.unflatten(1, (groups, -1)).copy_(x.unflatten(1, (rows, -1)).transpose(0, 1))


def _to_probabilities(scores: torch.Tensor, p: torch.Tensor, logsumexp: torch.Tensor, rows: slice, scale: float) -> None:
    """p = softmax(scale scores), both [groups, rows * heads of a group, keys], 0 at keys later than the row; the last row sees
    every key. The logarithm of each softmax's sum goes to logsumexp [all rows, heads]. The scores are used up."""
    groups, _, keys = p.shape
    new, heads = rows.stop - rows.start, logsumexp.size(1) // groups
    if scores.dtype == torch.float32 and (run := kernel("attention_probabilities", p)):
        return run(scores, p, logsumexp, rows.start, new, groups, heads, keys, scale)
    _later(scores.mul_(scale), new).masked_fill_(_mask(new), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    sums = scores.sub_(top).exp_().sum(-1, keepdim=True)
    torch.div(scores, sums, out=scores)
    if p.dtype != scores.dtype:
        p.copy_(scores)
    _from_groups(sums.log_().add_(top), logsumexp[rows][..., None])


def _to_gradients(
    scores: torch.Tensor,
    along: torch.Tensor,
    p: torch.Tensor,
    ds: torch.Tensor,
    logsumexp: torch.Tensor,
    delta: torch.Tensor,
    rows: slice,
    scale: float,
) -> None:
    """From scores q k and along = g v: p = softmax(scale scores) and ds = scale p (along - delta), the gradient of q k, all
    [groups, rows * heads of a group, keys], and exactly 0 at keys later than the row. logsumexp, delta [all rows, heads]."""
    groups, _, keys = p.shape
    new, heads = rows.stop - rows.start, logsumexp.size(1) // groups
    if scores.dtype == torch.float32 and (run := kernel("attention_gradients", p)):
        return run(scores, along, p, ds, logsumexp, delta, rows.start, new, groups, heads, keys, scale)
    sums, delta = (_by_group(x[rows][..., None], groups, x.dtype) for x in (logsumexp, delta))
    torch.add(-sums, scores, alpha=scale, out=scores).exp_()
    _later(scores, new).masked_fill_(_mask(new), 0)  # even where exp overflowed
    along.sub_(delta).mul_(scores).mul_(scale)
    if p.dtype != scores.dtype:
        p.copy_(scores)
        ds.copy_(along)


def _row_products(grad: torch.Tensor, result: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The sums over the last dimension of grad * result, both [rows, heads, width]."""
    if run := kernel("row_products", grad):
        sums = torch.empty(grad.shape[:2])
        run(grad.contiguous(), result, sums, sums.numel(), grad.size(2))
        return sums
    return (grad.to(wide) * result).sum(-1)


def _later(p: torch.Tensor, new: int) -> torch.Tensor:
    """Of p [groups, rows * heads, keys] the last `new` keys, which are the rows' own: a view [groups, rows, heads, new]."""
    return p.unflatten(1, (new, -1))[..., p.size(2) - new :]


@functools.cache
def _mask(new: int) -> torch.Tensor:
    """Which of `new` keys are later than each of their rows, [rows, 1, new]."""
    return torch.ones(new, new, dtype=torch.bool).triu(1)[:, None]
