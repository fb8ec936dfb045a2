"""Root-mean-square norm (Zhang & Sennrich 2019) for megatron-core's layer spec.

On a CPU torch composes it of elementwise operations, and autograd would keep each one's fp32 result for every layer; here the
input and one number per row are kept, the rest is computed again in backward, and memory is passed over half as often, or by
a compiled kernel once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from relax.backend.kernels import kernel

ROWS = 64  # whose share of the weight's gradient a kernel adds up: a number of threads must not change it


class RMSNorm(torch.nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension; x [..., hidden_size].

    megatron's own torch norm refuses sequence parallelism; this one marks its weight, so that its gradient is summed over the
    tensor-parallel ranks, each of which saw part of the rows.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron reads it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            result: torch.Tensor = _LeanRMSNorm.apply(x, self.weight, self.eps)
            return result
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _LeanRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if run := kernel("norm_forward", x):
            x, result = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
            scale = torch.empty(*x.shape[:-1], 1)
            run(x, weight, result, scale, scale.numel(), x.size(-1), eps)
            ctx.save_for_backward(x, weight, scale)
            return result
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = wide * scale if wide is x else wide.mul_(scale)
        return normed.mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = (saved.flatten(0, -2) if saved.dim() > 1 else saved for saved in ctx.saved_tensors)
        if run := kernel("norm_backward", x):
            grad_x = torch.empty_like(x)
            parts = torch.empty(-(-x.size(0) // ROWS), x.size(1))
            run(grad.contiguous(), x, weight, scale, grad_x, parts, x.size(0), x.size(1), ROWS)
            return grad_x.view_as(grad), parts.sum(0).to(weight.dtype), None
        rows, grad_y, weight_ = x.to(scale.dtype), grad.flatten(0, -2).to(scale.dtype), weight.to(scale.dtype)
        # With n = scale x, the normed row: grad_w = sum_rows grad n, and grad_x = scale (grad w - n mean(grad w n)).
        both = grad_y * rows
        grad_weight = both.t().mv(scale[:, 0])
        along = both.mv(weight_)[:, None].mul_(scale.square()).div_(-x.size(-1))
        grad_x = torch.mul(grad_y, weight_, out=both).addcmul_(rows, along).mul_(scale)
        return grad_x.to(x.dtype).view_as(grad), grad_weight.to(weight.dtype), None
