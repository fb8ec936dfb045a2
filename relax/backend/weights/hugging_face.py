"""Weights between Hugging Face names and this rank's megatron-core parameters: one table, both directions.

Loading copies into the views that `weight_table` gives of a parameter, exporting reads them, so the two directions cannot
disagree. What a rank does not hold it does not read: tensors come slice by slice, converted as they are copied.

Invariants: Hugging Face -> megatron-core -> Hugging Face gives the same bits (in one dtype) on every TP, PP, virtual PP, EP
and expert-tensor layout; padding rows of the vocabulary are zero on load and absent on export; every rank sees the same error.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from relax.backend.device import wait_until_sent
from relax.backend.model.families import HFConfig
from relax.backend.model.preference_model import PreferenceModel
from relax.backend.parallel import agree
from relax.backend.weights.tensor_files import TensorFiles
from relax.backend.weights.weight_table import EMBEDDING, LM_HEAD, SCORE, SPLIT_AXIS, Entry, parts_of, weight_plan
from relax.errors import UserError

# Hugging Face -> megatron-core


def load_hf_weights(chunks: Sequence[PreferenceModel], directory: Path, config: HFConfig, *, seed: int) -> None:
    """Fill this rank's parameters from a Hugging Face directory, converted to their dtype. Collective over all ranks.

    A scalar head takes `score.weight` [1, hidden_size] where the directory has one, else N(0, config.initializer_range)
    drawn from `seed`, the same on every layout. UserError, on every rank: no safetensors, an unreadable file, tensors
    that are missing, unexpected or of another shape.
    """
    plan = weight_plan(chunks, config)
    agree(lambda: _load(chunks, plan, TensorFiles(directory), config, seed=seed))


def _load(chunks: Sequence[PreferenceModel], plan: list[Entry], source: TensorFiles, config: HFConfig, *, seed: int) -> None:
    if chunks[0].head == "scalar" and SCORE not in source:
        plan = [entry for entry in plan if entry.names != (SCORE,)]
        initialize_score(chunks, config, seed=seed)
    check_source(source, plan, chunks[0], config)
    for entry in plan:
        if entry.stage == parallel_state.get_pipeline_model_parallel_rank():
            chunk = chunks[entry.chunk]
            fill(chunk.get_parameter(entry.parameter), entry, source, chunk, config)


def check_source(source: TensorFiles, plan: list[Entry], model: PreferenceModel, config: HFConfig) -> None:
    """UserError unless the files hold the plan's tensors, of their shapes, and no others."""
    source.check(_shapes(plan), ignored={LM_HEAD} if model.head == "scalar" or config.tie_word_embeddings else set())


def _shapes(plan: list[Entry]) -> dict[str, tuple[int, ...]]:
    return {name: shape for entry in plan for name, shape in zip(entry.names, entry.shapes, strict=True)}


def fill(parameter: torch.Tensor, entry: Entry, source: TensorFiles, chunk: PreferenceModel, config: HFConfig) -> None:
    """Copy this rank's shard of the entry's tensors into its parameter of `chunk`, or into a tensor of that shape."""
    axis, holders = SPLIT_AXIS[entry.kind], entry.holders(chunk.config)
    rank = 0 if axis is None else entry.group.rank() - holders.start
    if rank not in range(len(holders)):
        return
    for name, part in zip(entry.names, parts_of(entry.view(parameter), entry.kind, chunk.config), strict=True):
        size = 0 if axis is None else part.flatten(0, 1).size(axis)
        piece = source.read(name, axis=axis, first=rank * size, size=size)
        rows = piece.size(0) // part.size(0)
        part[:, :rows].copy_(piece.unflatten(0, (part.size(0), rows)))
        part[:, rows:].zero_()  # the vocabulary's padding
        if name == EMBEDDING and chunk.head == "lm" and config.tie_word_embeddings and LM_HEAD in source:
            _refuse_other(source, piece, source.read(LM_HEAD, axis=axis, first=rank * size, size=size))


def _refuse_other(source: TensorFiles, embedding: torch.Tensor, output: torch.Tensor) -> None:
    if not torch.equal(embedding, output):
        raise UserError(
            f"{source.directory}: config.json ties the embeddings, but {LM_HEAD} differs from {EMBEDDING}; "
            "set tie_word_embeddings to false there, or remove the tensor"
        )


def check_finite(chunks: Sequence[PreferenceModel], config: HFConfig, *, where: str) -> None:
    """UserError, on every rank, that names by Hugging Face's names what holds NaN or infinity; `where` it was read from."""

    def work() -> None:
        for entry in weight_plan(chunks, config):
            if entry.stage != parallel_state.get_pipeline_model_parallel_rank():
                continue
            view = entry.view(chunks[entry.chunk].get_parameter(entry.parameter).detach())
            for name, part in zip(entry.names, parts_of(view, entry.kind, chunks[0].config), strict=True):
                if not all(bound.isfinite() for bound in torch.aminmax(part)):
                    raise UserError(
                        f"{where}: {name} holds values that are NaN or infinite; the file is damaged, or its training "
                        "diverged: take another copy, or an earlier checkpoint"
                    )

    agree(work)


@torch.no_grad()
def initialize_score(chunks: Sequence[PreferenceModel], config: HFConfig, *, seed: int) -> None:
    """Draw the reward head from N(0, config.initializer_range), a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(1, config.hidden_size).normal_(0.0, config.initializer_range, generator=generator)
    for chunk in chunks:
        if chunk.head == "scalar" and chunk.post_process:
            chunk.score.weight.copy_(weight)


# megatron-core -> Hugging Face


def hf_shapes(chunks: Sequence[PreferenceModel], config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that `hf_tensors` gives, in its order. Collective over the pipeline group."""
    return _shapes(weight_plan(chunks, config))


def hf_tensors(chunks: Sequence[PreferenceModel], config: HFConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every weight under its Hugging Face name, whole, in the order of the layers; a tied output layer is not repeated.

    On rank 0 a CPU tensor in the model's dtype, which may share its parameter's memory; elsewhere None. All ranks must
    iterate to the end. One parameter is in flight at a time.
    """
    seen: set[str] = set()
    for entry in weight_plan(chunks, config):
        if entry.names[0] not in seen:
            seen.update(entry.names)
            yield from zip(entry.names, _collect(chunks, entry), strict=True)


def _collect(chunks: Sequence[PreferenceModel], entry: Entry) -> Sequence[torch.Tensor | None]:
    """The entry's tensors on rank 0: gathered over tensor parallelism where they live, then sent to the first stage."""
    nothing = [None] * len(entry.names)
    stage, group = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_group()
    if entry.expert is None:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        replica = parallel_state.get_expert_data_parallel_rank()
    if replica or stage not in (0, entry.stage):
        return nothing
    tensors: list[torch.Tensor] | None = None
    if stage == entry.stage:
        tensors = _gather(chunks[entry.chunk], entry)
    if entry.group.rank():
        return nothing
    if entry.stage != 0:
        if tensors is not None:
            for tensor in tensors:
                _send(tensor, group=group)
            return nothing
        like = next(chunks[0].parameters())
        tensors = [torch.empty(shape, dtype=like.dtype, device=like.device) for shape in entry.shapes]
        for tensor in tensors:
            dist.recv(tensor, group=group, group_src=entry.stage)
    assert tensors is not None
    return [tensor.cpu() for tensor in tensors]


def _send(tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """Send to the group's first rank, and wait until it has it."""
    dist.send(tensor.contiguous(), group=group, group_dst=0)
    wait_until_sent(tensor.device)


def _gather(chunk: PreferenceModel, entry: Entry) -> list[torch.Tensor] | None:
    """The entry's whole tensors on its group's first rank, None on the others."""
    own, group, axis = entry.view(chunk.get_parameter(entry.parameter)), entry.group, SPLIT_AXIS[entry.kind]
    holders = entry.holders(chunk.config)
    if group.rank():
        if group.rank() in holders:
            _send(own, group=group)
        return None
    shards = [torch.empty_like(own) if holder else own for holder in holders]
    for holder, shard in zip(holders, shards, strict=True):
        if holder:
            dist.recv(shard, group=group, group_src=holder)
    tensors = []
    for parts, shape in zip(
        zip(*(parts_of(shard, entry.kind, chunk.config) for shard in shards), strict=True), entry.shapes, strict=True
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
