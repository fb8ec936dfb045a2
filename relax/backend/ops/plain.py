"""Every operator in torch's operations, on any device and in any dtype: what runs where nothing faster does, and what each
other implementation is tested against.

Composed naively, autograd would keep a norm's and SwiGLU's intermediate results for every layer. Here the input alone is kept,
and a norm's one number per row; the rest is computed again in backward, in fewer passes over memory.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from relax.backend.model.layout import PackedLayout
from relax.backend.ops.autograd import Kept, operator
from relax.backend.ops.record import Choice, Ops

PRODUCT_ROWS = 8192  # of a weight's gradient that are a product before they are added, where the product is rounded
PART_BYTES = 2 << 20  # of logits that are widened at a time: as many as fit into a CPU's cache


def norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Kept]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale)
    return normed.mul_(weight).to(x.dtype), (x, weight, scale)


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """With n = scale x, the normed row: grad_w = sum_rows grad n, and grad_x = scale (grad w - n mean(grad w n))."""
    rows, grad_y, scale = (tensor.flatten(0, -2).to(scale.dtype) for tensor in (x, grad, scale))
    weight_ = weight.to(scale.dtype)
    both = grad_y * rows
    grad_weight = both.t().mv(scale[:, 0])
    along = both.mv(weight_)[:, None].mul_(scale.square()).div_(-x.size(-1))
    grad_x = torch.mul(grad_y, weight_, out=both).addcmul_(rows, along).mul_(scale)
    return grad_x.to(x.dtype).view_as(grad), grad_weight.to(weight.dtype), None


def swiglu_forward(x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    x = x.contiguous()
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up), (x,)


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    grad_x = torch.empty_like(x)
    gate, up = x.chunk(2, -1)
    grad_gate, grad_up = grad_x.chunk(2, -1)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    torch.mul(grad, F.silu(gate), out=grad_up)
    return (grad_x,)


def rotate_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    return rotated(x, cos, sin, sign=1), (cos, sin)


def rotate_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return rotated(grad, cos, sin, sign=-1), None, None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: int) -> torch.Tensor:
    """x turned by the angles, or, with sign -1, back."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    """torch's scaled dot-product attention, a call for each block."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, rows, head_dim]
    out = [
        F.scaled_dot_product_attention(
            q[:, :, block.q0 : block.q1],
            block.take_keys(k),
            block.take_keys(v),
            attn_mask=layout.mask(block, q.device),
            is_causal=block.is_square,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        for block in layout.blocks
    ]
    return torch.cat(out, 2)[0].transpose(0, 1)


def grouped_linear(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def widened(x: torch.Tensor) -> torch.Tensor:
    return x


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(rows, weight.t())


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), rows.to(grad.dtype))
    else:
        for part in slices(total.size(0), PRODUCT_ROWS):
            total[part].add_(grad[:, part].t() @ rows)


def logits_sum(z: torch.Tensor, top: torch.Tensor, total: torch.Tensor, *, part_bytes: int = PART_BYTES) -> None:
    for part, logits, space in _parts(z, top.dtype, part_bytes):
        top[part] = logits.amax(1)
        total[part] = torch.sub(logits, top[part, None], out=space).exp_().sum(1)


def logits_gradient(
    z: torch.Tensor,
    logsumexp: torch.Tensor,
    grad: torch.Tensor,
    column: torch.Tensor,
    at_target: torch.Tensor,
    *,
    part_bytes: int = PART_BYTES,
) -> None:
    for part, dz, _ in _parts(z, logsumexp.dtype, part_bytes):
        dz.sub_(logsumexp[part, None]).exp_().mul_(-grad[part]).scatter_add_(1, column[part], at_target[part])
        if dz.dtype != z.dtype:
            z[part] = dz


def _parts(z: torch.Tensor, wide: torch.dtype, part_bytes: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """A few rows of logits at a time: where, in `wide` (themselves if they are), and space like them."""
    rows = max(1, part_bytes // (wide.itemsize * z.size(1)))
    space = torch.empty(min(rows, z.size(0)), z.size(1), dtype=wide, device=z.device)
    for part in slices(z.size(0), rows):
        own = space[: part.stop - part.start]
        yield part, z[part] if z.dtype == wide else own.copy_(z[part]), own


def slices(rows: int, size: int) -> list[slice]:
    """[0, rows) in pieces of `size`, the last one shorter."""
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


PLAIN = Ops(
    rms_norm=operator("RMSNorm", norm_forward, norm_backward),
    swiglu=operator("SwiGLU", swiglu_forward, swiglu_backward),
    rotate=operator("Rotate", rotate_forward, rotate_backward),
    attention=attention,
    grouped_linear=grouped_linear,
    widened=widened,
    linear=linear,
    add_weight_gradient=add_weight_gradient,
    logits_sum=logits_sum,
    logits_gradient=logits_gradient,
    choices={name: Choice("torch", "asked for") for name in ("attention", "elementwise work")},
)
