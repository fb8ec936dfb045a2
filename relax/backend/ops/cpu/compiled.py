"""The operators' elementwise work by the kernels of kernels.cpp, for fp32 and bf16: a pass over memory each.

Sums are fp32, a result is rounded to bf16 once.
"""

import torch

from relax.backend.ops.autograd import Kept
from relax.backend.ops.cpu import passes
from relax.backend.ops.cpu.kernels import run

NORM_ROWS = 64  # whose share of a norm's weight gradient is added up at once: a number of threads must not change it


def norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Kept]:
    x = x.contiguous()
    result, scale = torch.empty_like(x), torch.empty(*x.shape[:-1], 1)
    run("norm_forward", x.dtype, x, weight, result, scale, scale.numel(), x.size(-1), eps)
    return result, (x, weight, scale)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, width = scale.numel(), x.size(-1)
    grad_x, parts = torch.empty_like(x), torch.empty(-(-rows // NORM_ROWS), width)
    run("norm_backward", x.dtype, grad.contiguous(), x, weight, scale, grad_x, parts, rows, width, NORM_ROWS)
    return grad_x, parts.sum(0).to(weight.dtype), None


def swiglu_forward(x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    x, width = x.contiguous(), x.size(-1) // 2
    result = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
    run("swiglu_forward", x.dtype, x, result, result.numel() // max(1, width), width)
    return result, (x,)


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    grad_x, width = torch.empty_like(x), grad.size(-1)
    run("swiglu_backward", x.dtype, grad.contiguous(), x, grad_x, grad.numel() // max(1, width), width)
    return (grad_x,)


def rotate_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    return _rotated(x, cos, sin, sign=1.0), (cos, sin)


def rotate_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _rotated(grad, cos, sin, sign=-1.0), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: float) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, _, heads, width = x.shape
    run("rotate", x.dtype, x, cos, sin, out, rows, heads, width // 2, x.stride(0), x.stride(2), sign)
    return out


def logits_sum(z: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> None:
    run("logits_sum", z.dtype, z, top, total, z.size(0), z.size(1))


def logits_gradient(
    z: torch.Tensor, logsumexp: torch.Tensor, grad: torch.Tensor, column: torch.Tensor, at_target: torch.Tensor
) -> None:
    columns = (tensor.contiguous() for tensor in (grad, column, at_target))
    run("logits_gradient", z.dtype, z, logsumexp, *columns, z.size(0), z.size(1))


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add dense `part` to dense fp32 `total` of the same shape."""
    run("add", part.dtype, total, part, part.numel())


# Attention, see `Passes`.


def by_group(x: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float32:
        return passes.by_group(x, groups, dtype)
    rows, heads, width = x.shape
    out = torch.empty(groups, rows * (heads // groups), width)
    run("by_group", x.dtype, x.contiguous(), out, rows, groups, heads // groups * width)
    return out


def from_groups(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        return passes.from_groups(x, out)
    rows, heads, width = out.shape
    run("from_groups", out.dtype, x, out, rows, x.size(0), heads // x.size(0) * width)


def to_probabilities(scores: torch.Tensor, p: torch.Tensor, logsumexp: torch.Tensor, rows: slice, scale: float) -> None:
    (groups, _, keys), new = p.shape, rows.stop - rows.start
    heads = logsumexp.size(1) // groups
    run("attention_probabilities", p.dtype, scores, p, logsumexp, rows.start, new, groups, heads, keys, scale)


def to_gradients(
    scores: torch.Tensor,
    along: torch.Tensor,
    p: torch.Tensor,
    ds: torch.Tensor,
    logsumexp: torch.Tensor,
    delta: torch.Tensor,
    rows: slice,
    scale: float,
) -> None:
    (groups, _, keys), new = p.shape, rows.stop - rows.start
    sizes = (rows.start, new, groups, logsumexp.size(1) // groups, keys)
    run("attention_gradients", p.dtype, scores, along, p, ds, logsumexp, delta, *sizes, scale)


def row_products(grad: torch.Tensor, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    sums = torch.empty(grad.shape[:2], dtype=dtype)
    run("row_products", grad.dtype, grad.contiguous(), result, sums, sums.numel(), grad.size(2))
    return sums


PASSES = passes.Passes(
    by_group=by_group,
    from_groups=from_groups,
    to_probabilities=to_probabilities,
    to_gradients=to_gradients,
    row_products=row_products,
)
