"""Attention over blocks on a CPU: forward by torch's flash kernel, backward by batched products.

The kernel computes a causal call whole up to 512 keys, so half of its work is for nothing. Here a block's queries go a few at a
time, each time with the keys that the last of them sees, under a mask that only hides keys from the queries before it. Backward
(Dao et al. 2022, Algorithm 4) does likewise, because the kernel's own backward is several times slower in bf16, and adds what
keys get from several calls into one buffer: autograd would make a pack-sized gradient for every slice.

Invariants: equal to softmax attention over each block's keys, values and gradients; what is kept for backward is in the
inputs' dtype but for one number per row and head; sums over calls are fp32 (fp64 for fp64 input).
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from relax.backend.kernels import kernel
from relax.backend.layout import Block, PackedLayout
from relax.backend.products import products_of, scratch, widened

QUERIES = 128  # of a call: fewer leave less work for nothing, more make larger products
BACKWARD_SCORES = 1 << 25  # of a call of backward, over heads: it bounds memory where keys are many

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
        q, k, v = (_by_head(widened(x)) for x in (query, key, value))
        result = torch.empty(query.shape, dtype=query.dtype)
        logsumexp = torch.empty(q.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in blocks:
            keys, values = block.take_keys(k), block.take_keys(v)
            hidden = _corner(3 * QUERIES // 2, max(512, 1 << (block.num_keys - 1).bit_length()), q.dtype)
            for rows, seen in _calls(block, QUERIES):
                mask = hidden[rows.start - rows.stop :, hidden.size(1) - seen :]
                _by_head(result)[:, :, rows], logsumexp[:, :, rows] = _forward(
                    q[:, :, rows], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
                )
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        groups, wide = key.size(1), logsumexp.dtype
        k, v = (x.transpose(0, 1).to(wide, memory_format=torch.contiguous_format) for x in (key, value))
        q, g, delta = _by_group(query, grad, result, groups, wide)
        grad_q, grad_k, grad_v = torch.empty(query.shape, dtype=query.dtype), torch.zeros_like(k), torch.zeros_like(v)
        heads = query.size(1) // groups
        with products_of(query.dtype):
            for block in ctx.blocks:
                keys, values = block.take_keys(k), block.take_keys(v)
                few = BACKWARD_SCORES // (query.size(1) * block.num_keys)
                for rows, seen in _calls(block, max(1, min(QUERIES, few))):
                    own = slice(rows.start * heads, rows.stop * heads)
                    q_own, g_own, k_seen, v_seen = q[:, own], g[:, own], keys[:, :seen], values[:, :seen]
                    shape = (2, groups, q_own.size(1), seen)
                    p, ds = scratch("attention", math.prod(shape), wide).view(shape)
                    torch.bmm(q_own, k_seen.transpose(1, 2), out=p)
                    torch.bmm(g_own, v_seen.transpose(1, 2), out=ds)
                    _scores_to_gradients(p, ds, logsumexp[0], delta, rows, ctx.scale)
                    block.add_to_keys(grad_v, torch.bmm(p.transpose(1, 2), g_own))
                    block.add_to_keys(grad_k, torch.bmm(ds.transpose(1, 2), q_own))
                    _from_groups(torch.bmm(ds, k_seen), ctx.scale, grad_q[rows])
        return grad_q, grad_k.mul_(ctx.scale).transpose(0, 1).to(key.dtype), grad_v.transpose(0, 1).to(value.dtype), None, None


def _by_group(
    query: torch.Tensor, grad: torch.Tensor, result: torch.Tensor, groups: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, grad and result [rows, heads, width] -> query and grad in `wide` [groups, rows * heads of a group, width], and the
    sums of grad * result [groups, rows * heads of a group]."""
    rows, heads, width = query.shape
    if run := kernel("attention_rows", query):
        q, g = torch.empty(2, groups, rows * heads // groups, width)
        delta = torch.empty(q.shape[:2])
        run(query.contiguous(), grad.contiguous(), result, q, g, delta, rows, groups, heads // groups, width)
        return q, g, delta
    q, g, out = (x.to(wide).unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2) for x in (query, grad, result))
    return q, g, (g * out).sum(-1)


def _scores_to_gradients(
    p: torch.Tensor, ds: torch.Tensor, logsumexp: torch.Tensor, delta: torch.Tensor, rows: slice, scale: float
) -> None:
    """p, which holds the scores q k, and ds, which holds g v, both [groups, rows * heads of a group, keys], become in place
    exp(scale q k - logsumexp) and p (g v - delta), and exactly 0 at keys later than the row; the last row sees every key.

    logsumexp [heads, all rows]; delta [groups, all rows * heads of a group].
    """
    groups, keys, new = p.size(0), p.size(2), rows.stop - rows.start
    heads = logsumexp.size(0) // groups
    if run := kernel("attention_scores", p):
        return run(p, ds, logsumexp, delta, rows.start, new, logsumexp.size(1), groups, heads, keys, scale)
    lse = logsumexp[:, rows].unflatten(0, (groups, heads)).transpose(1, 2).reshape(groups, -1, 1)
    torch.add(-lse, p, alpha=scale, out=p).exp_()
    for head in range(heads):  # even where exp overflowed
        p[:, head::heads, keys - new :].tril_()
    ds.sub_(delta[:, rows.start * heads : rows.stop * heads, None]).mul_(p)


def _from_groups(grad: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """scale * grad [groups, rows * heads of a group, width] into out [rows, heads, width]."""
    rows, heads, width = out.shape
    if run := kernel("attention_grad", out):
        return run(grad, out, rows, grad.size(0), heads // grad.size(0), width, scale)
    out.unflatten(1, (grad.size(0), -1)).copy_(grad.mul_(scale).unflatten(1, (rows, -1)).transpose(0, 1))


def _calls(block: Block, queries: int) -> Iterator[tuple[slice, int]]:
    """A block in calls of about `queries`: the query rows, and how many of the block's keys the last of them sees."""
    size = block.q1 - block.q0
    count = max(1, round(size / queries))
    for i in range(count):
        q0, q1 = (block.q0 + size * j // count for j in (i, i + 1))
        yield slice(q0, q1), block.num_keys - (block.q1 - q1)


@functools.cache  # of powers of two, so that all together are twice the largest
def _corner(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of the last queries on all keys, [queries, keys]: -inf where a key is later."""
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(later, -torch.inf)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] -> a view [1, heads, rows, head_dim]."""
    return rows.transpose(0, 1)[None]
