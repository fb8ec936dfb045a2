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
        by_group = functools.partial(_by_group, groups=groups, dtype=wide)
        k, v = (x.transpose(0, 1).to(wide, memory_format=torch.contiguous_format) for x in (key, value))
        logsumexp = logsumexp[0].t()[:, :, None]
        grad_q, grad_k, grad_v = torch.empty_like(query), torch.zeros_like(k), torch.zeros_like(v)
        heads = query.size(1) // groups
        with products_of(query.dtype):
            for block in ctx.blocks:
                keys, values = block.take_keys(k), block.take_keys(v)
                few = BACKWARD_SCORES // (query.size(1) * block.num_keys)
                for rows, seen in _calls(block, max(1, min(QUERIES, few))):
                    q, g, out, lse = (by_group(x[rows]) for x in (query, grad, result, logsumexp))
                    k_seen, v_seen = keys[:, :seen].contiguous(), values[:, :seen].contiguous()
                    shape = (2, q.size(0), q.size(1), seen)
                    p, ds = scratch("attention", math.prod(shape), wide).view(shape)
                    torch.bmm(q, k_seen.transpose(1, 2), out=p)
                    p = torch.add(-lse, p, alpha=ctx.scale, out=p).exp_()
                    new = rows.stop - rows.start
                    for head in range(heads):  # exactly 0 for a later key, even where exp overflowed
                        p[:, head::heads, seen - new :].tril_()
                    torch.bmm(g, v_seen.transpose(1, 2), out=ds).sub_((g * out).sum(-1, keepdim=True)).mul_(p)
                    block.add_to_keys(grad_v, torch.bmm(p.transpose(1, 2), g))
                    block.add_to_keys(grad_k, torch.bmm(ds.transpose(1, 2), q))
                    grad_rows = torch.bmm(ds, k_seen).mul_(ctx.scale)
                    grad_q[rows].unflatten(1, (groups, heads)).copy_(grad_rows.unflatten(1, (new, heads)).transpose(0, 1))
        return grad_q, grad_k.mul_(ctx.scale).transpose(0, 1).to(key.dtype), grad_v.transpose(0, 1).to(value.dtype), None, None


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


def _by_group(rows: torch.Tensor, *, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, heads, width] -> [groups, rows * heads of a group, width]."""
    parts = rows.unflatten(1, (groups, -1)).transpose(0, 1)
    return parts.to(dtype, memory_format=torch.contiguous_format).flatten(1, 2)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] -> a view [1, heads, rows, head_dim]."""
    return rows.transpose(0, 1)[None]
