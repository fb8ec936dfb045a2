"""The operators of a CPU: kernels compiled on this machine, oneDNN's products, attention by batched products."""

from dataclasses import replace
from functools import partial

import torch

from relax.backend.ops.autograd import operator
from relax.backend.ops.cpu import attention, compiled, kernels, passes, products
from relax.backend.ops.plain import PLAIN
from relax.backend.ops.record import Choice, Ops


def cpu_ops(dtype: torch.dtype, *, attention_choice: Choice) -> Ops:
    """The operators for `dtype`: compiled kernels where they can be built, torch's operations elsewhere."""
    ops = replace(
        PLAIN,
        attention=partial(attention.attend, passes=passes.TORCH),
        widened=products.widened,
        linear=products.linear,
        add_weight_gradient=products.add_weight_gradient,
    )
    library = kernels.library() if dtype in kernels.SUFFIX else "compiled kernels are for fp32 and bf16"
    if isinstance(library, str):
        return replace(ops, choices={"attention": attention_choice, "elementwise work": Choice("torch", library)})
    kept = f"; built for this run alone: {library.unkept}" if library.unkept else ""
    work = Choice(f"compiled, {library.key}", f"faster than torch's{kept}")
    return replace(
        ops,
        choices={"attention": attention_choice, "elementwise work": work},
        rms_norm=operator("RMSNorm", compiled.norm_forward, compiled.norm_backward),
        swiglu=operator("SwiGLU", compiled.swiglu_forward, compiled.swiglu_backward),
        rotate=operator("Rotate", compiled.rotate_forward, compiled.rotate_backward),
        attention=partial(attention.attend, passes=compiled.PASSES),
        logits_sum=compiled.logits_sum,
        logits_gradient=compiled.logits_gradient,
    )
