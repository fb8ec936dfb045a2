"""Gradients that go straight into megatron-core's fp32 buffer of their weight, and how megatron learns of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_values(weight: torch.Tensor) -> torch.Tensor:
    """A gradient for megatron to see that there is one; its values are in the weight's `main_grad`."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # megatron reads it
    return torch.empty_like(weight)


def into_buffer(embedding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch's embedding, whose weight's gradient goes into megatron's buffer where there is one: summed in fp32, and not as a
    matrix of the whole vocabulary."""

    @functools.wraps(embedding)
    def embed(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or not hasattr(weight, "main_grad"):
            return embedding(ids, weight, *args, **kwargs)
        result: torch.Tensor = _Embedding.apply(ids, weight)
        return result

    return embed


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return torch.embedding(weight, ids)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,), total = ctx.saved_tensors, ctx.weight.main_grad
        total.index_add_(0, ids.flatten(), grad.flatten(0, -2).to(total.dtype))
        return None, without_values(ctx.weight)
