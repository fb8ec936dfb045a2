"""Log-probabilities of target tokens without the logits.

For row i with hidden state h_i and target t_i: log p_i = h_i W_t - logsumexp_v(h_i W_v), over a vocabulary that may be split
over tensor-parallel ranks and padded at its end. Rows go through the vocabulary matmul in chunks and are recomputed in
backward, so at most `chunk` rows of logits exist at a time (design idea 5). The last chunk is kept for backward.

Invariants: equal to log_softmax(h W^T).gather(t), values and gradients, for every chunk size and vocabulary split; rows of
the weight at or beyond `vocab_size` (padding) get no probability and no gradient. Sums are fp32 (fp64 for fp64 input). What
needs no gradient, a frozen weight or hidden states, costs neither its product nor its memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from relax.backend.kernels import kernel
from relax.backend.products import add_to_wide, times_transposed, widened, without_values

CHUNK_BYTES = 128 << 20  # one chunk of logits: large enough for full matmul speed, small beside the model
PRODUCT_ROWS = 8192  # of the weight's gradient that are a product before they are added, where it is rounded
PART_BYTES = 2 << 20  # what of it is widened at a time on a CPU


def target_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
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
        chunk = max(64, CHUNK_BYTES // (widened(weight[:0]).itemsize * weight.size(0)))
    result: torch.Tensor = _TargetLogprobs.apply(hidden, weight, targets, vocab_size, group, chunk, grad_into, ready)
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
        real = widened(weight[: shard.real])
        z = None
        for at in _slices(rows, chunk) if shard.real else ():
            z = None  # one chunk of logits at a time
            z = times_transposed(hidden[at].to(real.dtype), real)
            column, here = shard.local(targets[at])
            picked[at] = (z.gather(1, column).to(wide) * here)[:, 0]
            _add_up(z, top[at], total[at])
        own_top = top.clone()
        shard.reduce(top, dist.ReduceOp.MAX)
        shard.reduce(total.mul_((own_top - top).exp_()))
        shard.reduce(picked)
        logsumexp = total.log() + top
        # Backward starts where this ends: the last chunk, often the only one, need not be computed again.
        ctx.last = z if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.shard, ctx.chunk, ctx.grad_into = shard, chunk, grad_into
        ctx.ready = weight if ready else None
        return picked - logsumexp

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        shard, wide, (of_hidden, of_weight) = ctx.shard, logsumexp.dtype, ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if of_hidden else None
        grad_weight = ctx.grad_into if of_weight else None
        if of_weight and grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        real = widened(weight[: shard.real])
        grad = grad[:, None].to(wide)
        for at in reversed(_slices(hidden.size(0), ctx.chunk)) if shard.real else ():
            z, ctx.last = ctx.last, None
            if z is None:
                z = times_transposed(hidden[at].to(real.dtype), real)
            column, here = shard.local(targets[at])
            _to_gradient(z, logsumexp[at], grad[at], column, grad[at] * here)
            if grad_hidden is not None:
                grad_hidden[at] = z @ real
            if grad_weight is not None:
                _add_weight_gradient(grad_weight[: shard.real], z, hidden[at])
            del z
        if grad_hidden is not None:
            shard.reduce(grad_hidden)
        if grad_weight is None or ctx.grad_into is None:
            own = None if grad_weight is None else grad_weight.to(weight.dtype)
        else:
            own = None if ctx.ready is None else without_values(ctx.ready)
        return grad_hidden, own, *[None] * 6


def _add_weight_gradient(total: torch.Tensor, z: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add the product of the logits' gradient z [rows, vocab] and hidden [rows, hidden_size] to total [vocab, hidden_size]."""
    if z.dtype == total.dtype:
        total.addmm_(z.t(), hidden.to(z.dtype))
        return
    for ids in _slices(total.size(0), PRODUCT_ROWS):
        add_to_wide(total[ids], z[:, ids].t() @ hidden)


def _slices(rows: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def _add_up(z: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> None:
    """Each row's largest logit into `top` and the sum of exp(logit - top) into `total`, both [rows]."""
    if run := kernel("logits_sum", z):
        return run(z, top, total, z.size(0), z.size(1))
    for part, logits, space in _parts(z, top.dtype):
        top[part] = logits.amax(1)
        total[part] = torch.sub(logits, top[part, None], out=space).exp_().sum(1)


def _to_gradient(
    z: torch.Tensor, logsumexp: torch.Tensor, grad: torch.Tensor, column: torch.Tensor, at_target: torch.Tensor
) -> None:
    """Logits z [rows, vocab shard] become their gradient in place: -grad softmax, and at_target more in the target's column.

    logsumexp [rows]; grad, column and at_target [rows, 1].
    """
    if run := kernel("logits_gradient", z):
        return run(z, logsumexp, grad.contiguous(), column.contiguous(), at_target.contiguous(), z.size(0), z.size(1))
    for part, dz, _ in _parts(z, logsumexp.dtype):
        dz.sub_(logsumexp[part, None]).exp_().mul_(-grad[part]).scatter_add_(1, column[part], at_target[part])
        if dz.dtype != z.dtype:
            z[part] = dz


def _parts(z: torch.Tensor, wide: torch.dtype) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows of logits, on a CPU as few as fit into its cache: where, in `wide` (themselves if they are), and space like them."""
    size = PART_BYTES if z.device.type == "cpu" else 32 * PART_BYTES
    rows = max(1, size // (wide.itemsize * z.size(1)))
    space = torch.empty(min(rows, z.size(0)), z.size(1), dtype=wide, device=z.device)
    for part in _slices(z.size(0), rows):
        own = space[: part.stop - part.start]
        yield part, z[part] if z.dtype == wide else own.copy_(z[part]), own


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
