"""SwiGLU (Shazeer 2020) for megatron-core's MLP: silu(gate) * up.

Composed of torch's operations autograd would keep silu(gate) beside the input for every layer; here the input alone is kept and
silu is computed again in backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from relax.backend.kernels import kernel


class SwiGLU(MegatronModule):
    """x [..., 2 * width], gate before up -> [..., width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SwiGLU.apply(x)
        return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        if run := kernel("swiglu_forward", x):
            width = x.size(-1) // 2
            result = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
            run(x, result, result.numel() // max(1, width), width)
            return result
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        if run := kernel("swiglu_backward", x):
            width = grad.size(-1)
            run(grad.contiguous(), x, grad_x, grad.numel() // max(1, width), width)
            return grad_x
        gate, up = x.chunk(2, -1)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, F.silu(gate), out=grad_up)
        return grad_x
