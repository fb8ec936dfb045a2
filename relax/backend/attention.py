"""Core attention under the one layout rule (design idea 3).

A block says: query rows [q0, q1) attend to the concatenation of some key ranges, with a causal mask aligned to the bottom
right. Plain packing, a prompt shared by its two completions and context-parallel shards are all blocks. Here each block is
one call of torch's scaled dot-product attention, on any device.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from relax.backend.layout import PackedLayout
from relax.backend.products import widened


class PackedAttention(MegatronModule):
    """megatron-core's `core_attention`, for packed rows: query [rows, 1, heads, head_dim] -> [rows, 1, heads * head_dim]."""

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
    ) -> None:
        super().__init__(config=config)
        self.scale, self.cp_group = softmax_scale, pg_collection.cp

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
        layout, rows, dtype = packed_seq_params, query.size(0), query.dtype
        if self.cp_group.size() > 1:
            # Every rank needs every key: all-gather (backward: reduce-scatter), then rows back into the pack's order.
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.cp_group)
            key, value = both[layout.gathered_order].split((key.size(-1), value.size(-1)), -1)
        q, k, v = (widened(x).squeeze(1).transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, rows, head_dim]
        grouped = q.size(1) != k.size(1)
        out = []
        with contextlib.nullcontext() if q.dtype == dtype else _kept_as(dtype):
            for block in layout.blocks:
                keys, values = block.take_keys(k), block.take_keys(v)
                out.append(
                    F.scaled_dot_product_attention(
                        q[:, :, block.q0 : block.q1],
                        keys,
                        values,
                        attn_mask=layout.mask(block, q.device),
                        is_causal=block.is_square,
                        scale=self.scale,
                        enable_gqa=grouped,
                    )
                )
        return torch.cat(out, 2)[0].transpose(0, 1).reshape(rows, 1, -1).to(dtype)


def _kept_as(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """What attention computes wider than `dtype` its backward finds rounded to it, as a `dtype` kernel keeps it.

    That changes nothing in queries, keys and values, which were widened from it.
    """

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        rows_and_heads = tensor.dim() == 4 and tensor.is_floating_point()  # not the logsumexp
        return tensor.to(dtype) if rows_and_heads else tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, widened)
