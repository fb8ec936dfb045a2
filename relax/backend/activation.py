"""SwiGLU (Shazeer 2020) for megatron-core's MLP: silu(gate) * up.

Composed of torch's operations autograd would keep silu(gate) beside the input for every layer; here the input alone is kept and
silu is computed again in backward. Values and gradients are the composition's own, bit for bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


class SwiGLU(MegatronModule):
    """x [..., 2 * width], gate before up -> [..., width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SwiGLU.apply(x)
        return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        grad_x = torch.empty_like(ctx.saved_tensors[0])
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, F.silu(gate), out=grad_up)
        return grad_x
