"""Core attention under the one layout rule (design idea 3).

A block says: query rows [q0, q1) attend to the concatenation of some key ranges, with a causal mask aligned to the bottom
right. Plain packing, a prompt shared by its two completions and context-parallel shards are all blocks. Three backends compute
them alike: `sdpa`, torch's scaled dot-product attention, a call for each block, on any device and in any dtype; and on a GPU,
in half precision, `varlen` (torch's own kernel) and `flash` (the flash-attn package), one call for all blocks.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from relax.backend.cpu_attention import attend_on_cpu
from relax.backend.kernels import kernel
from relax.backend.layout import PackedLayout, VarlenCall
from relax.errors import UserError

Backend = Literal["sdpa", "varlen", "flash"]


@functools.cache
def kernel_of(backend: Backend) -> Callable[..., Any] | None:
    """The library's kernel of a backend that is one call, where it is installed; it takes a second to load."""
    module, name = {"flash": ("flash_attn", "flash_attn_varlen_func"), "varlen": ("torch.nn.attention.varlen", "varlen_attn")}[
        backend
    ]
    try:
        kernel = getattr(importlib.import_module(module), name)
    except ImportError:
        return None
    needed = (
        {"scale", "window_size", "enable_gqa", "num_splits"} if backend == "varlen" else set()
    )  # an earlier torch lacks some
    return kernel if needed <= inspect.signature(kernel).parameters.keys() else None


def choose_backend(asked: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Backend, str]:
    """The backend for `--attention-backend auto|sdpa|varlen|flash`, and why; UserError where the one asked for cannot work."""
    if asked == "sdpa":
        return "sdpa", "asked for"
    missing: dict[Backend, str] = {
        "flash": "the flash-attn package is not installed",
        "varlen": "this torch brings no such kernel",
    }
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
        for name in missing:
            if not reasons and kernel_of(name):
                return name, "the fastest that is installed"
        return "sdpa", "; ".join(reasons or missing.values())
    backend: Backend = "flash" if asked == "flash" else "varlen"
    if kernel_of(backend) is None:
        reasons.append(missing[backend])
    if reasons:
        raise UserError(f"--attention-backend {asked}: {'; '.join(reasons)}; auto takes what works here")
    return backend, "asked for"


class PackedAttention(MegatronModule):
    """megatron-core's `core_attention`, for packed rows: query [rows, 1, heads, head_dim] -> [rows, 1, heads * head_dim].

    Query and key come unrotated: the layout has each row's rotary embedding.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        backend: Backend = "sdpa",
    ) -> None:
        super().__init__(config=config)
        # megatron leaves the scale out where it is the usual one, which not every kernel assumes.
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp_group, self.attend = pg_collection.cp, BACKENDS[backend]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedLayout,
    ) -> torch.Tensor:
        layout = packed_seq_params
        query, key = (_Rotate.apply(x, *layout.rotation) for x in (query, key))
        if self.cp_group.size() > 1:
            # Every rank needs every key: all-gather (backward: reduce-scatter), then rows back into the pack's order.
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.cp_group)
            key, value = both[layout.gathered_order].split((key.size(-1), value.size(-1)), -1)
        out = self.attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), layout, self.scale)
        return out.reshape(query.size(0), 1, -1)


class _Rotate(torch.autograd.Function):
    """Rotary position embedding (Su 2021) of x [rows, 1, heads, head_dim] by cos and sin [rows, 1, 1, head_dim / 2]: the first
    half of a head's dimensions with the second, as in Hugging Face's models. megatron's own takes twice the operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, forth=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _rotated(grad, *ctx.saved_tensors, forth=False), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, forth: bool) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (out_a, out_b), sign = x.chunk(2, -1), out.chunk(2, -1), 1 if forth else -1
    if (run := kernel("rotate", x)) and x.stride(-1) == 1:
        run(x, cos, sin, out, x.size(0), x.size(2), a.size(-1), x.stride(0), x.stride(2), float(sign))
        return out
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)
    return out


# Each backend: query, key and value [rows, heads, head_dim] -> [rows, heads, head_dim].


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    if query.device.type == "cpu":
        return attend_on_cpu(query, key, value, layout, scale)
    return _call_each(query, key, value, layout, scale)


def _call_each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, rows, head_dim]
    out = [
        F.scaled_dot_product_attention(
            q[:, :, block.q0 : block.q1],
            block.take_keys(k),
            block.take_keys(v),
            attn_mask=layout.mask(block, q.device),
            is_causal=block.is_square,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        for block in layout.blocks
    ]
    return torch.cat(out, 2)[0].transpose(0, 1)


def _in_one_call(call_kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backend of a call (query, key, value, call, scale) that takes all blocks at once."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout, scale: float) -> torch.Tensor:
        call = layout.varlen_call()
        if call.key_rows is not None:
            key, value = key.index_select(0, call.key_rows), value.index_select(0, call.key_rows)
        return call_kernel(query, key, value, call, scale)

    return attend


def _loaded(backend: Backend) -> Callable[..., Any]:
    kernel = kernel_of(backend)
    assert kernel is not None  # `choose_backend` saw to it
    return kernel


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float) -> torch.Tensor:
    ends = (call.query_ends, call.key_ends, call.max_queries, call.max_keys)
    grouped = query.size(1) != key.size(1)
    # One split: a row's bits then do not depend on what else is in the pack.
    out: torch.Tensor = _loaded("varlen")(
        query, key, value, *ends, scale=scale, window_size=(-1, 0), enable_gqa=grouped, num_splits=1
    )
    return out


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float) -> torch.Tensor:
    ends = (call.query_ends, call.key_ends, call.max_queries, call.max_keys)
    out: torch.Tensor = _loaded("flash")(
        query, key, value, *ends, softmax_scale=scale, causal=True, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    return out


BACKENDS = {"sdpa": _sdpa, "varlen": _in_one_call(_varlen), "flash": _in_one_call(_flash)}
