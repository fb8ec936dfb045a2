"""The table of weights: which Hugging Face tensors a megatron-core parameter holds, and which part of them a rank has.

A parameter is a shard of one Hugging Face tensor, or of several stacked by row (attention's in turns, by query group).
The table says which tensors and how; the kind says which axis tensor parallelism splits. `parts_of` gives the shards as
views of the parameter, for either direction. A parameter of experts is an entry per expert, held by the ranks of one
expert-parallel place and split by expert-tensor parallelism.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from relax.backend.model.families import HFConfig
from relax.backend.model.preference_model import PreferenceModel

Kind = Literal["replicated", "row", "gated", "qkv", "vocabulary"]

EMBEDDING, LM_HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter name, the Hugging Face tensors it stacks (`*` is the layer's number, `#` the expert's) and how.

    replicated: one tensor, whole on every rank. row: one, split over axis 1, for megatron's row-parallel layers.
    vocabulary: one, split over axis 0 and padded at its end. gated: gate over up, each split over axis 0. qkv: per
    query group its queries, its key and its value; axis 0 is split by group.
    """

    parameter: str
    kind: Kind
    tensors: tuple[str, ...]


def _layer(parameter: str, kind: Kind, *tensors: str) -> Row:
    return Row(f"decoder.layers.*.{parameter}", kind, tuple(f"model.layers.*.{tensor}" for tensor in tensors))


TABLE = {
    row.parameter: row
    for row in (
        Row("embedding.word_embeddings.weight", "vocabulary", (EMBEDDING,)),
        _layer("input_layernorm.weight", "replicated", "input_layernorm.weight"),
        _layer("self_attention.linear_qkv.weight", "qkv", *(f"self_attn.{x}_proj.weight" for x in "qkv")),
        _layer("self_attention.linear_qkv.bias", "qkv", *(f"self_attn.{x}_proj.bias" for x in "qkv")),
        _layer("self_attention.q_layernorm.weight", "replicated", "self_attn.q_norm.weight"),
        _layer("self_attention.k_layernorm.weight", "replicated", "self_attn.k_norm.weight"),
        _layer("self_attention.linear_proj.weight", "row", "self_attn.o_proj.weight"),
        _layer("pre_mlp_layernorm.weight", "replicated", "post_attention_layernorm.weight"),
        _layer("mlp.linear_fc1.weight", "gated", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        _layer("mlp.linear_fc2.weight", "row", "mlp.down_proj.weight"),
        _layer("mlp.router.weight", "replicated", "mlp.gate.weight"),
        _layer("mlp.experts.weight1", "gated", "mlp.experts.#.gate_proj.weight", "mlp.experts.#.up_proj.weight"),
        _layer("mlp.experts.weight2", "row", "mlp.experts.#.down_proj.weight"),
        Row("decoder.final_layernorm.weight", "replicated", ("model.norm.weight",)),
        Row("output_layer.weight", "vocabulary", (LM_HEAD,)),
        Row("score.weight", "replicated", (SCORE,)),
    )
}
SPLIT_AXIS: dict[Kind, int | None] = {"replicated": None, "row": 1, "gated": 0, "qkv": 0, "vocabulary": 0}


def parts_of(parameter: torch.Tensor, kind: Kind, config: TransformerConfig) -> tuple[torch.Tensor, ...]:
    """Views of a parameter (or of another rank's, of the same shape): its shard of each tensor, [groups, rows, ...]."""
    groups: int = 1
    widths: tuple[int, ...] = (1,)
    if kind == "gated":
        widths = (1, 1)
    elif kind == "qkv":
        groups = config.num_query_groups // config.tensor_model_parallel_size
        widths = (config.num_attention_heads // config.num_query_groups, 1, 1)
    grouped = parameter.detach().unflatten(0, (groups, -1))
    unit = grouped.size(1) // sum(widths)
    return grouped.split([width * unit for width in widths], 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of this model-parallel replica, or one expert's part of it; names and whole shapes of its tensors."""

    stage: int
    chunk: int
    parameter: str
    kind: Kind
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's shard in its parameter; of an expert that lives elsewhere, one of its own."""
        own = parameter.detach()
        return own if self.expert is None else own[self.expert % own.size(0)]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of a stage among which the shards are spread; its first is the stage's first."""
        if self.expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_and_model_parallel_group()

    def holders(self, config: TransformerConfig) -> range:
        """Places in the group of the ranks that hold the shards, in order."""
        if self.expert is None:
            return range(1 if SPLIT_AXIS[self.kind] is None else config.tensor_model_parallel_size)
        first = self.expert * config.expert_model_parallel_size // config.num_moe_experts
        split: int = config.expert_tensor_parallel_size
        return range(first * split, (first + 1) * split)


def weight_plan(chunks: Sequence[PreferenceModel], config: HFConfig) -> list[Entry]:
    """Every parameter of the model in the order of its layers, on all ranks. Collective over the pipeline group."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = [
        _entry(name, part, expert=expert, stage=stage, number=number, chunk=chunk, tied=config.tie_word_embeddings)
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        for expert, part in _by_expert(name, parameter, chunk.config)
    ]
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    # Interleaved stages take turns: chunk 0 of every stage comes before chunk 1 of any.
    return sorted(itertools.chain(*stages), key=lambda entry: (entry.chunk, entry.stage))


def _by_expert(name: str, parameter: torch.Tensor, config: TransformerConfig) -> Iterator[tuple[int | None, torch.Tensor]]:
    """(number of an expert, a parameter of its shape) for all experts; (None, the parameter) where it is not of experts."""
    if ".experts." not in name:
        yield None, parameter
        return
    for expert in range(config.num_moe_experts):
        yield expert, parameter[0]


def _entry(
    name: str,
    parameter: torch.Tensor,
    *,
    expert: int | None,
    stage: int,
    number: int,
    chunk: PreferenceModel,
    tied: bool,
) -> Entry:
    local = re.match(r"decoder\.layers\.(\d+)\.", name)
    row = TABLE[re.sub(r"layers\.\d+\.", "layers.*.", name)]
    names = row.tensors
    if local:
        layer = chunk.decoder.layers[int(local[1])].layer_number - 1
        names = tuple(tensor.replace("*", str(layer)).replace("#", str(expert)) for tensor in names)
    elif names == (LM_HEAD,) and tied:
        names = (EMBEDDING,)  # the last pipeline stage's copy
    axis = SPLIT_AXIS[row.kind]
    sizes = chunk.config.tensor_model_parallel_size, chunk.config.expert_tensor_parallel_size
    shapes = []
    for part in parts_of(parameter, row.kind, chunk.config):
        shape = list(part.flatten(0, 1).shape)
        if axis is not None:
            shape[axis] *= sizes[expert is not None]
        if row.kind == "vocabulary":
            shape[0] = chunk.real_vocab_size
        shapes.append(tuple(shape))
    return Entry(stage, number, name, row.kind, names, tuple(shapes), expert)
