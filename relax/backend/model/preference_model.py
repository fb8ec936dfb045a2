"""A Hugging Face model directory's config -> megatron-core's GPTModel that turns a packed layout into sequence scores.

The model ends in one of two heads. `lm`: per sequence, the sum of its completion tokens' log-probabilities. `scalar`: the
reward head's output at the sequence's last token. Either way only the scored rows leave the last layer, and `forward` on
the last pipeline stage returns scores [num_sequences] in fp32 (fp64 for an fp64 model).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from relax.backend.model.families import HFConfig, family_of, head_dim, inverse_frequencies
from relax.backend.model.layers import ModelConfig, PackedAttention, RMSNorm, SwiGLU
from relax.backend.model.layout import PackedLayout
from relax.backend.model.logprobs import target_logprobs
from relax.backend.model.moe import adopt_layers, moe_options, use_own_experts
from relax.backend.ops import Ops
from relax.objectives.base import Head


def transformer_config(config: HFConfig, *, dtype: torch.dtype, ops: Ops, **overrides: Any) -> ModelConfig:
    """megatron-core's config for a Hugging Face one, with operators; parallel sizes come from the initialised parallel state.

    `perform_initialization` stays on with no-op functions: off, megatron leaves parameters untagged as tensor-parallel and
    their gradient norm is silently wrong. Fusions that need apex or Transformer Engine kernels are off.
    """
    family = family_of(config)
    values: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config),
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # megatron's name for "the layer spec brings the activation": SwiGLU
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,  # packs differ in length between micro-batches
        "moe_token_dispatcher_type": "alltoall",  # the one that takes such packs
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    return ModelConfig(ops=ops, **{**values, **(moe_options(config) if family.experts else {}), **overrides})


def _keep(weight: torch.Tensor) -> torch.Tensor:
    """Initialise nothing: every weight is loaded."""
    return weight


class PreferenceModel(GPTModel):
    """GPTModel over packed layouts; `forward(ids [1, rows], None, None, packed_seq_params=layout)` gives sequence scores."""

    def __init__(
        self,
        config: ModelConfig,
        hf_config: HFConfig,
        *,
        head: Head,
        vp_stage: int | None = None,
    ) -> None:
        self.head: Head = head
        self.real_vocab_size = hf_config.vocab_size
        tensor_parallel = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(config, vp_stage),
            vocab_size=-(-hf_config.vocab_size // tensor_parallel) * tensor_parallel,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            # A scalar head needs no output layer: megatron allocates none beside a tied embedding.
            share_embeddings_and_output_weights=head == "scalar" or hf_config.tie_word_embeddings,
            position_embedding_type="none",  # positions are the layout's, see _preprocess
            vp_stage=vp_stage,
        )
        self.inverse_frequencies = inverse_frequencies(hf_config)  # not a buffer: it stays fp32 in a bf16 model
        if config.num_moe_experts:
            adopt_layers(self.decoder.layers)

    def setup_embeddings_and_output_layer(self) -> None:
        if self.head == "lm":
            super().setup_embeddings_and_output_layer()
            for weight in self.parameters():  # megatron's own output layer would put an empty gradient beside the embedding's
                weight.zero_out_wgrad = False
            return
        self.share_embeddings_and_output_weights = False
        if self.post_process:
            del self.output_layer
            self.score = torch.nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)

    def _preprocess(self, *args: Any, packed_seq_params: PackedLayout, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, _, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        positions, dtype = packed_seq_params.positions, self.config.params_dtype
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = torch.outer(positions.to(torch.float32), self.inverse_frequencies)[:, None, None, :]
        packed_seq_params.rotation = angles.cos().to(dtype), angles.sin().to(dtype)
        return (decoder_input, None, *rest)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: PackedLayout, **_: Any) -> Any:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # the head's backward already sums over the tensor-parallel ranks
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        rows = hidden_states[:, 0].index_select(0, packed_seq_params.score_rows)
        values = self._target_logprobs(rows, packed_seq_params) if self.head == "lm" else self._rewards(rows)
        if packed_seq_params.weights is not None:
            values = values * packed_seq_params.weights
        scores = torch.segment_reduce(values, "sum", lengths=packed_seq_params.target_counts, initial=0, unsafe=True)
        if self.config.context_parallel_size > 1:  # each rank scored its own rows: sum forward, identity backward
            scores = reduce_from_tensor_model_parallel_region(scores, group=self.pg_collection.cp)
        return scores

    def _target_logprobs(self, rows: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        # The weight's gradient goes straight to megatron's fp32 buffer. Beside its embedding, that one's gradient tells
        # megatron that the parameter is ready.
        return target_logprobs(
            rows,
            weight,
            layout.targets,
            ops=self.config.ops,
            vocab_size=self.real_vocab_size,
            group=self.pg_collection.tp,
            grad_into=getattr(weight, "main_grad", None),
            ready=not (tied and self.pre_process),
        )

    def _rewards(self, rows: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        return (rows.to(wide) * self.score.weight.to(wide)).sum(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        if self.head == "lm":
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # GPTModel's own looks for an output layer.
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def _block_spec(config: ModelConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    experts = config.num_moe_experts
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    if experts:
        use_own_experts(layer)
    else:
        layer.submodules.mlp.submodules.activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=RMSNorm)
