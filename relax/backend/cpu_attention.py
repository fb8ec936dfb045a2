"""Attention over blocks on a CPU, by torch's flash kernel.

The kernel computes a causal call whole up to 512 keys, so half of its work is for nothing. Here a block's queries go a few at a
time, each time with the keys that the last of them sees, under a mask that only hides keys from the queries before it. Backward
calls the kernel's own and adds what keys get from several calls into one buffer: autograd would make a pack-sized gradient for
every slice.

Invariants: equal to softmax attention over each block's keys, values and gradients; what is kept for backward is in the
inputs' dtype but for one number per row and head; sums over calls are fp32 (fp64 for fp64 input).
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from relax.backend.layout import Block, PackedLayout
from relax.backend.products import widened

QUERIES = 64  # of a call: fewer leave less work for nothing, more make larger products

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
            for rows, seen, mask in _calls(block, q.dtype):
                _by_head(result)[:, :, rows], logsumexp[:, :, rows] = _forward(
                    q[:, :, rows], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
                )
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.blocks, ctx.scale = blocks, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        q, k, v, out, grad = (_by_head(widened(x)) for x in (query, key, value, result, grad.contiguous()))
        grads = [torch.zeros(x.shape, dtype=logsumexp.dtype) for x in (query, key, value)]
        grad_q, grad_k, grad_v = (_by_head(x) for x in grads)
        for block in ctx.blocks:
            keys, values = block.take_keys(k), block.take_keys(v)
            for rows, seen, mask in _calls(block, q.dtype):
                grad_q[:, :, rows], *parts = _backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    out[:, :, rows],
                    logsumexp[:, :, rows],
                    0.0,  # no dropout
                    False,
                    attn_mask=mask,
                    scale=ctx.scale,
                )
                for total, part in zip((grad_k, grad_v), parts, strict=True):
                    block.add_to_keys(total, part)
        return *(x.to(query.dtype) for x in grads), None, None


def _calls(block: Block, dtype: torch.dtype) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """A block in calls: the query rows, how many of the block's keys the last of them sees, and what hides keys from them."""
    hidden = _corner(QUERIES, max(512, 1 << (block.num_keys - 1).bit_length()), dtype)
    for q0 in range(block.q0, block.q1, QUERIES):
        q1 = min(q0 + QUERIES, block.q1)
        seen = block.num_keys - (block.q1 - q1)
        yield slice(q0, q1), seen, hidden[q0 - q1 :, hidden.size(1) - seen :]


@functools.cache  # of powers of two, so that all together are twice the largest
def _corner(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of the last queries on all keys, [queries, keys]: -inf where a key is later."""
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(later, -torch.inf)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] -> a view [1, heads, rows, head_dim]."""
    return rows.transpose(0, 1)[None]
