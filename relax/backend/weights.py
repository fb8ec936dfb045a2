"""Weights between Hugging Face names and this rank's megatron-core parameters: one table, both directions.

A parameter is a shard of one Hugging Face tensor, or of several stacked by row (attention's in turns, by query group).
The table says which tensors and how; the kind says which axis tensor parallelism splits. `_parts` gives the shards as
views of the parameter: loading copies into them, exporting reads them, so the two directions cannot disagree. What a
rank does not hold it does not read: tensors come slice by slice, converted as they are copied.

Invariants: Hugging Face -> megatron-core -> Hugging Face gives the same bits (in one dtype) on every TP, PP and virtual
PP layout; padding rows of the vocabulary are zero on load and absent on export; every rank sees the same error.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from relax.backend.model import HFConfig, PreferenceModel
from relax.backend.parallel import agree
from relax.backend.tensor_files import TensorFiles
from relax.errors import UserError

Kind = Literal["replicated", "row", "gated", "qkv", "vocabulary"]

EMBEDDING, LM_HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter name, the Hugging Face tensors it stacks (`*` is the layer's number) and how.

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
        Row("decoder.final_layernorm.weight", "replicated", ("model.norm.weight",)),
        Row("output_layer.weight", "vocabulary", (LM_HEAD,)),
        Row("score.weight", "replicated", (SCORE,)),
    )
}
_SPLIT_AXIS: dict[Kind, int | None] = {"replicated": None, "row": 1, "gated": 0, "qkv": 0, "vocabulary": 0}


def _parts(parameter: torch.Tensor, kind: Kind, config: TransformerConfig) -> tuple[torch.Tensor, ...]:
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
class _Entry:
    """One parameter of this model-parallel replica, and the names and whole shapes of its tensors."""

    stage: int
    chunk: int
    parameter: str
    kind: Kind
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def _plan(chunks: Sequence[PreferenceModel], config: HFConfig) -> list[_Entry]:
    """Every parameter of the model in the order of its layers, on all ranks. Collective over the pipeline group."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = [
        _entry(name, parameter, stage=stage, number=number, chunk=chunk, tied=config.tie_word_embeddings)
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    ]
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    # Interleaved stages take turns: chunk 0 of every stage comes before chunk 1 of any.
    return sorted(itertools.chain(*stages), key=lambda entry: (entry.chunk, entry.stage))


def _entry(name: str, parameter: torch.Tensor, *, stage: int, number: int, chunk: PreferenceModel, tied: bool) -> _Entry:
    local = re.match(r"decoder\.layers\.(\d+)\.", name)
    row = TABLE[re.sub(r"layers\.\d+\.", "layers.*.", name)]
    names = row.tensors
    if local:
        layer = chunk.decoder.layers[int(local[1])].layer_number - 1
        names = tuple(tensor.replace("*", str(layer)) for tensor in names)
    elif names == (LM_HEAD,) and tied:
        names = (EMBEDDING,)  # the last pipeline stage's copy
    axis = _SPLIT_AXIS[row.kind]
    shapes = []
    for part in _parts(parameter, row.kind, chunk.config):
        shape = list(part.flatten(0, 1).shape)
        if axis is not None:
            shape[axis] *= chunk.config.tensor_model_parallel_size
        if row.kind == "vocabulary":
            shape[0] = chunk.real_vocab_size
        shapes.append(tuple(shape))
    return _Entry(stage, number, name, row.kind, names, tuple(shapes))


# Hugging Face -> megatron-core


def load_hf_weights(chunks: Sequence[PreferenceModel], directory: Path, config: HFConfig, *, seed: int) -> None:
    """Fill this rank's parameters from a Hugging Face directory, converted to their dtype. Collective over all ranks.

    A scalar head takes `score.weight` [1, hidden_size] where the directory has one, else N(0, config.initializer_range)
    drawn from `seed`, the same on every layout. UserError, on every rank: no safetensors, an unreadable file, tensors
    that are missing, unexpected or of another shape.
    """
    plan = _plan(chunks, config)
    agree(lambda: _load(chunks, plan, TensorFiles(directory), config, seed=seed))


def _load(chunks: Sequence[PreferenceModel], plan: list[_Entry], source: TensorFiles, config: HFConfig, *, seed: int) -> None:
    scalar = chunks[0].head == "scalar"
    expected = {name: shape for entry in plan for name, shape in zip(entry.names, entry.shapes, strict=True)}
    if scalar and SCORE not in source:
        del expected[SCORE]
        initialize_score(chunks, config, seed=seed)
    source.check(expected, ignored={LM_HEAD} if scalar or config.tie_word_embeddings else set())
    stage, rank = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    for entry in plan:
        if entry.stage != stage or entry.names[0] not in expected:
            continue
        chunk, axis = chunks[entry.chunk], _SPLIT_AXIS[entry.kind]
        parts = _parts(chunk.get_parameter(entry.parameter), entry.kind, chunk.config)
        for name, part in zip(entry.names, parts, strict=True):
            size = 0 if axis is None else part.flatten(0, 1).size(axis)
            piece = source.read(name, axis=axis, first=rank * size, size=size)
            rows = piece.size(0) // part.size(0)
            part[:, :rows].copy_(piece.unflatten(0, (part.size(0), rows)))
            part[:, rows:].zero_()  # the vocabulary's padding
            if name == EMBEDDING and not scalar and config.tie_word_embeddings and LM_HEAD in source:
                _refuse_other(source, piece, source.read(LM_HEAD, axis=axis, first=rank * size, size=size))


def _refuse_other(source: TensorFiles, embedding: torch.Tensor, output: torch.Tensor) -> None:
    if not torch.equal(embedding, output):
        raise UserError(
            f"{source.directory}: config.json ties the embeddings, but {LM_HEAD} differs from {EMBEDDING}; "
            "set tie_word_embeddings to false there, or remove the tensor"
        )


@torch.no_grad()
def initialize_score(chunks: Sequence[PreferenceModel], config: HFConfig, *, seed: int) -> None:
    """Draw the reward head from N(0, config.initializer_range), a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(1, config.hidden_size).normal_(0.0, config.initializer_range, generator=generator)
    for chunk in chunks:
        if chunk.head == "scalar" and chunk.post_process:
            chunk.score.weight.copy_(weight)


# megatron-core -> Hugging Face


def hf_tensors(chunks: Sequence[PreferenceModel], config: HFConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every weight under its Hugging Face name, whole, in the order of the layers; a tied output layer is not repeated.

    On rank 0 a CPU tensor in the model's dtype, which may share its parameter's memory; elsewhere None. All ranks must
    iterate to the end. One parameter is in flight at a time.
    """
    seen: set[str] = set()
    for entry in _plan(chunks, config):
        if entry.names[0] not in seen:
            seen.update(entry.names)
            yield from zip(entry.names, _collect(chunks, entry), strict=True)


def _collect(chunks: Sequence[PreferenceModel], entry: _Entry) -> Sequence[torch.Tensor | None]:
    """The entry's tensors on rank 0: gathered over tensor parallelism where they live, then sent to the first stage."""
    nothing = [None] * len(entry.names)
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_group()
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) or stage not in (0, entry.stage):
        return nothing
    tensors: list[torch.Tensor] | None = None
    if stage == entry.stage:
        tensors = _gather(chunks[entry.chunk], entry)
    if parallel_state.get_tensor_model_parallel_rank():
        return nothing
    if entry.stage != 0:
        if tensors is not None:
            for tensor in tensors:
                dist.send(tensor.contiguous(), group=group, group_dst=0)
            return nothing
        like = next(chunks[0].parameters())
        tensors = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in entry.shapes]
        for tensor in tensors:
            dist.recv(tensor, group=group, group_src=entry.stage)
    assert tensors is not None
    return [tensor.cpu() for tensor in tensors]


def _gather(chunk: PreferenceModel, entry: _Entry) -> list[torch.Tensor] | None:
    """The entry's whole tensors on its stage's first tensor-parallel rank, None on the others."""
    parameter = chunk.get_parameter(entry.parameter).detach()
    axis, size = _SPLIT_AXIS[entry.kind], chunk.config.tensor_model_parallel_size
    shards = [parameter]
    if axis is not None and size > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        shards = [torch.empty_like(parameter) for _ in range(size)] if first else []
        dist.gather(parameter, shards or None, group=group, group_dst=0)
    if not shards:
        return None
    tensors = []
    for parts, shape in zip(
        zip(*(_parts(shard, entry.kind, chunk.config) for shard in shards), strict=True), entry.shapes, strict=True
    ):
        flat = [part.flatten(0, 1) for part in parts]
        tensors.append((flat[0] if len(flat) == 1 else torch.cat(flat, axis or 0))[: shape[0]])
    return tensors


def weight_hashes(chunks: Sequence[PreferenceModel], config: HFConfig) -> dict[str, Any]:
    """{"sha256", "dtype", "tensors": {name: sha256}}, hex, equal on every rank and layout. Collective over all ranks.

    A tensor's hash is over its little-endian bytes; the total is over the lines "name hash\\n" in order of name.
    """
    tensors = {}
    for name, tensor in hf_tensors(chunks, config):
        if tensor is not None:
            tensors[name] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items()))
    dtype = str(chunks[0].config.params_dtype).removeprefix("torch.")
    result: list[Any] = [
        {"sha256": hashlib.sha256(lines.encode()).hexdigest(), "dtype": dtype, "tensors": dict(sorted(tensors.items()))}
    ]
    dist.broadcast_object_list(result, src=0)
    hashes: dict[str, Any] = result[0]
    return hashes
