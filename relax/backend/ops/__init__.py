"""The operators with more than one implementation, chosen once for a run's device and dtype.

`plain.py` has each in torch's operations, `cpu/` and `cuda/` have what is faster there. `choose_ops` makes the record of a
run's choice, the engine puts it into the model's config, and whatever computes takes it from there (`config.ops`). Nothing else
in relax asks for the device, but for `device.py`; that one also puts a CPU's products in the place of torch's and apex's that
megatron-core calls by name.

A kernel, here, is a compiled function that does an operator's work in one call: ours for a CPU, a library's for a GPU.
"""

import torch

from relax.backend.ops.cpu import cpu_ops
from relax.backend.ops.cuda import cuda_ops
from relax.backend.ops.cuda.attention import choose_attention
from relax.backend.ops.plain import PLAIN
from relax.backend.ops.record import Choice, Ops

__all__ = ["PLAIN", "Choice", "Ops", "choose_ops"]


def choose_ops(device: torch.device, dtype: torch.dtype, *, head_dim: int, attention: str = "auto") -> Ops:
    """The fastest operators that work here; attention: what `--attention-backend` asks for (UserError where it cannot work)."""
    choice = choose_attention(attention, device=device, dtype=dtype, head_dim=head_dim)
    of_device = cuda_ops if device.type == "cuda" else cpu_ops
    return of_device(dtype, attention_choice=choice)
