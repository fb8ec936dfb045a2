"""Attention over all blocks of a layout in one call of a variable-length kernel: torch's own, or the flash-attn package's.

They need a GPU and half precision. Elsewhere, or where none is installed, attention is `sdpa`, products for each block.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from relax.backend.model.layout import PackedLayout
from relax.backend.ops.record import Choice
from relax.errors import UserError

KERNELS = {"flash": ("flash_attn", "flash_attn_varlen_func"), "varlen": ("torch.nn.attention.varlen", "varlen_attn")}
MISSING = {"flash": "the flash-attn package is not installed", "varlen": "this torch brings no such kernel"}  # fastest first


@functools.cache
def kernel_of(name: str) -> Callable[..., Any] | None:
    """The kernel, where it is installed; it takes a second to load."""
    module, function = KERNELS[name]
    needed = {"scale", "window_size", "enable_gqa", "num_splits"} if name == "varlen" else set()  # an earlier torch lacks some
    try:
        kernel = getattr(importlib.import_module(module), function)
    except ImportError:
        return None
    return kernel if needed <= inspect.signature(kernel).parameters.keys() else None


def choose_attention(asked: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """What `--attention-backend auto|sdpa|varlen|flash` gives, and why; UserError where the one asked for cannot work."""
    if asked == "sdpa":
        return Choice("sdpa", "asked for")
    reasons = []
    if device.type != "cuda":
        reasons.append("variable-length kernels need a GPU")
    elif dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"variable-length kernels need bf16, not {str(dtype).removeprefix('torch.')}")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append("variable-length kernels need a GPU of compute capability 8.0")
    elif head_dim > 256 or head_dim % 8:
        reasons.append(f"variable-length kernels need heads of a multiple of 8 up to 256, not {head_dim}")
    if asked == "auto":
        for name in MISSING:
            if not reasons and kernel_of(name):
                return Choice(name, "the fastest that is installed")
        return Choice("sdpa", "; ".join(reasons or MISSING.values()))
    if kernel_of(asked) is None:
        reasons.append(MISSING[asked])
    if reasons:
        raise UserError(f"--attention-backend {asked}: {'; '.join(reasons)}; auto takes what works here")
    return Choice(asked, "asked for")


def in_one_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float, *, name: str
) -> torch.Tensor:
    """`Ops.attention`, by the kernel of that name, which `choose_attention` has found."""
    kernel, call = kernel_of(name), layout.varlen_call()
    assert kernel is not None
    if call.key_rows is not None:
        key, value = key.index_select(0, call.key_rows), value.index_select(0, call.key_rows)
    options: dict[str, Any]
    if name == "flash":
        repeats = torch.are_deterministic_algorithms_enabled()
        options = {"softmax_scale": scale, "causal": True, "deterministic": repeats}
    else:  # one split: a row's bits then do not depend on what else is in the pack
        grouped = query.size(1) != key.size(1)
        options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": grouped, "num_splits": 1}
    out: torch.Tensor = kernel(query, key, value, call.query_ends, call.key_ends, call.max_queries, call.max_keys, **options)
    return out
