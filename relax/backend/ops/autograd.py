"""An operator with gradients, from two functions without: every implementation of it keeps what its own backward needs."""

import types
from collections.abc import Callable
from typing import Any

import torch

Kept = tuple[torch.Tensor, ...]


def operator(
    name: str,
    run_forward: Callable[..., tuple[torch.Tensor, Kept]],
    run_backward: Callable[..., tuple[torch.Tensor | None, ...]],
) -> Callable[..., torch.Tensor]:
    """run_forward(*inputs) -> result, tensors to keep; run_backward(its gradient, *kept) -> a gradient or None for each input.

    A profile shows it as `name`.
    """

    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        result, kept = run_forward(*inputs)
        ctx.save_for_backward(*kept)
        return result

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return run_backward(grad, *ctx.saved_tensors)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = types.new_class(name, (torch.autograd.Function,), exec_body=lambda body: body.update(methods))
    apply: Callable[..., torch.Tensor] = function.apply
    return apply
