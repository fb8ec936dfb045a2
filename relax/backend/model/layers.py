"""The modules that megatron-core's layer spec takes from here: each a thin call of the run's operators."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from relax.backend.model.layout import PackedLayout
from relax.backend.ops import Ops


@dataclass(kw_only=True)
class ModelConfig(TransformerConfig):
    """megatron-core's config, and the operators: every module of the model has both as `config`."""

    ops: Ops


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, with a weight.

    megatron's own torch norm refuses sequence parallelism; this one marks its weight, so that its gradient is summed over the
    tensor-parallel ranks, each of which saw part of the rows.
    """

    def __init__(self, config: ModelConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.ops = eps, config.ops
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron reads it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class SwiGLU(MegatronModule):
    """x [..., 2 * width], gate before up -> [..., width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.config.ops.swiglu(x)
        return activated


class PackedAttention(MegatronModule):
    """megatron-core's `core_attention`, for packed rows: query [rows, 1, heads, head_dim] -> [rows, 1, heads * head_dim].

    The one layout rule (design idea 3): a block says that query rows [q0, q1) attend to the concatenation of some key ranges,
    with a causal mask aligned to the bottom right. Plain packing, a prompt shared by its two completions and context-parallel
    shards are all blocks. Query and key come unrotated: the layout has each row's rotary embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        # megatron leaves the scale out where it is the usual one, which not every kernel assumes.
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp_group, self.ops = pg_collection.cp, config.ops

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
        query, key = (self.ops.rotate(x, *layout.rotation) for x in (query, key))
        if self.cp_group.size() > 1:
            # Every rank needs every key: all-gather (backward: reduce-scatter), then rows back into the pack's order.
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.cp_group)
            key, value = both[layout.gathered_order].split((key.size(-1), value.size(-1)), -1)
        out = self.ops.attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), layout, self.scale)
        return out.reshape(query.size(0), 1, -1)
