"""Root-mean-square norm (Zhang & Sennrich 2019) for megatron-core's layer spec.

On a CPU torch composes it of elementwise operations, and autograd would keep each one's fp32 result for every layer; here the
input and one number per row are kept and the rest is computed again in backward. Forward is torch's own on every device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension; x [..., hidden_size].

    megatron's own torch norm refuses sequence parallelism; this one marks its weight, so that its gradient is summed over the
    tensor-parallel ranks, each of which saw part of the rows.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            result: torch.Tensor = _LeanRMSNorm.apply(x, self.weight, self.eps)
            return result
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _LeanRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt())
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype).mul(scale)
        grad = grad.to(scale.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        # The norm's own gradient is orthogonal to the normed row.
        grad_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
