"""Log-probabilities of target tokens without the logits.

For row i with hidden state h_i and target t_i: log p_i = h_i W_t - logsumexp_v(h_i W_v), over a vocabulary that may be split
over tensor-parallel ranks and padded at its end. Rows go through the vocabulary matmul in chunks and are recomputed in
backward, so at most `chunk` rows of logits exist at a time (design idea 5). The last chunk is kept for backward.

Invariants: equal to log_softmax(h W^T).gather(t), values and gradients, for every chunk size and vocabulary split; rows of
the weight at or beyond `vocab_size` (padding) get no probability and no gradient. Sums are fp32 (fp64 for fp64 input). What
needs no gradient, a frozen weight or hidden states, costs neither its product nor its memory.
"""

from typing import Any

import torch
import torch.distributed as dist

from relax.backend.ops import Ops
from relax.backend.ops.gradients import without_values
from relax.backend.ops.plain import slices

CHUNK_BYTES = 128 << 20  # one chunk of logits: large enough for full matmul speed, small beside the model


def target_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ops: Ops,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    grad_into: torch.Tensor | None = None,
    ready: bool = False,
) -> torch.Tensor:
    """log p(targets) [num_rows], fp32 or fp64, natural logarithm.

    hidden [num_rows, hidden_size]; weight [vocab shard, hidden_size], this rank's rows of the (padded) vocabulary;
    targets [num_rows], global token ids; group: the tensor-parallel group; chunk: rows at a time (None: by memory).
    grad_into: a buffer like `weight` in the dtype of the result, to which backward adds the weight's gradient; the weight's
    own then gets none from here, or, where it is `ready` with that, one without values, marked as added for megatron.
    """
    if chunk is None:
        chunk = max(64, CHUNK_BYTES // (ops.widened(weight[:0]).itemsize * weight.size(0)))
    result: torch.Tensor = _TargetLogprobs.apply(hidden, weight, targets, ops, vocab_size, group, chunk, grad_into, ready)
    return result


class _Shard:
    """This rank's slice of the vocabulary and the reductions over the others."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.first = self.group.rank() * weight.size(0) if self.group else 0
        self.real = max(0, min(weight.size(0), vocab_size - self.first))  # rows before the padding

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.group:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def local(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each target in this shard, 0 where it is elsewhere; whether it is here), both [n, 1]."""
        column = targets - self.first
        here = (column >= 0) & (column < self.real)
        return column.where(here, 0)[:, None], here[:, None]


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        ops: Ops,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        chunk: int,
        grad_into: torch.Tensor | None,
        ready: bool,
    ) -> torch.Tensor:
        shard = _Shard(weight, vocab_size, group)
        wide = _accumulator(hidden.dtype)
        rows = hidden.size(0)
        top = torch.full((rows,), -torch.inf, dtype=wide, device=hidden.device)
        total, picked = torch.zeros_like(top), torch.zeros_like(top)
        real = ops.widened(weight[: shard.real])
        z = None
        for at in slices(rows, chunk) if shard.real else ():
            z = None  # one chunk of logits at a time
            z = ops.linear(hidden[at].to(real.dtype), real)
            column, here = shard.local(targets[at])
            picked[at] = (z.gather(1, column).to(wide) * here)[:, 0]
            ops.logits_sum(z, top[at], total[at])
        own_top = top.clone()
        shard.reduce(top, dist.ReduceOp.MAX)
        shard.reduce(total.mul_((own_top - top).exp_()))
        shard.reduce(picked)
        logsumexp = total.log() + top
        # Backward starts where this ends: the last chunk, often the only one, need not be computed again.
        ctx.last = z if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.ops, ctx.shard, ctx.chunk, ctx.grad_into = ops, shard, chunk, grad_into
        ctx.ready = weight if ready else None
        return picked - logsumexp

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        ops, shard, wide, (of_hidden, of_weight) = ctx.ops, ctx.shard, logsumexp.dtype, ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = ctx.grad_into if of_weight else None
        if of_weight and grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        real = ops.widened(weight[: shard.real])
        grad = grad[:, None].to(wide)
        for at in reversed(slices(hidden.size(0), ctx.chunk)) if shard.real else ():
            z, ctx.last = ctx.last, None
            if z is None:
                z = ops.linear(hidden[at].to(real.dtype), real)
            column, here = shard.local(targets[at])
            ops.logits_gradient(z, logsumexp[at], grad[at], column, grad[at] * here)
            if grad_hidden is not None:
                grad_hidden[at] = z @ real
            if grad_weight is not None:
                ops.add_weight_gradient(grad_weight[: shard.real], z, hidden[at])
            del z
        if grad_hidden is not None:
            shard.reduce(grad_hidden)
        if grad_weight is None or ctx.grad_into is None:
            own = None if grad_weight is None else grad_weight.to(weight.dtype)
        else:
            own = None if ctx.ready is None else without_values(ctx.ready)
        return grad_hidden, own, *[None] * 7


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
