"""The operators of a GPU: torch's fused norm, variable-length attention kernels, grouped products."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from relax.backend.ops.cuda.attention import in_one_call
from relax.backend.ops.plain import PART_BYTES, PLAIN, grouped_linear, logits_gradient, logits_sum
from relax.backend.ops.record import Choice, Ops


def cuda_ops(dtype: torch.dtype, *, attention_choice: Choice) -> Ops:
    """The operators for `dtype`, with the attention that was chosen."""
    name, groups = attention_choice.name, dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    large = 32 * PART_BYTES  # parts of logits: each costs the start of a few kernels
    return replace(
        PLAIN,
        rms_norm=rms_norm,
        attention=PLAIN.attention if name == "sdpa" else partial(in_one_call, name=name),
        grouped_linear=grouped_in_one_call if groups else grouped_linear,
        logits_sum=partial(logits_sum, part_bytes=large),
        logits_gradient=partial(logits_gradient, part_bytes=large),
        choices={"attention": attention_choice, "elementwise work": Choice("torch", "compiled kernels are for a CPU")},
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def grouped_in_one_call(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """By torch's grouped product, which takes sizes in steps of 16 bytes, and some rows."""
    if not len(rows) or any(size % 8 for size in weights.shape[1:]):
        return grouped_linear(rows, weights, counts)
    ends = counts.to(rows.device).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
