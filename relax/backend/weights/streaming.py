"""Conversion between a Hugging Face directory and a Megatron checkpoint, in the memory of one parameter.

Strategy: the model is built on the meta device, with names, shapes and sharding but no bytes. What reads it, the exporter
or the checkpoint's writer, asks for one parameter after another; that one is read from the other format, and let go when
the next is asked for. Names and shards are those of training, so neither direction knows anything of its own.

Invariants: both directions keep every bit (of one dtype); the checkpoint has no parallel layout, as training's have none.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.multiprocessing.reductions import StorageWeakRef

from relax.backend.checkpoint.loading import CheckpointInfo, CheckpointStore, load_checkpoint
from relax.backend.checkpoint.state import sharding_metadata
from relax.backend.device import on_device
from relax.backend.model.families import HFConfig
from relax.backend.model.preference_model import PreferenceModel, transformer_config
from relax.backend.ops import PLAIN
from relax.backend.weights.hugging_face import check_source, fill, hf_tensors
from relax.backend.weights.tensor_files import TensorFiles
from relax.backend.weights.weight_table import weight_plan
from relax.objectives.base import Head

CPU, META = torch.device("cpu"), torch.device("meta")
_PIECE = 2**20  # elements compared at a time


class StreamedModel(PreferenceModel):
    """A model without memory, on one rank; `read` gives it a parameter by name, on the CPU, when it is needed."""

    def __init__(self, hf_config: HFConfig, *, head: Head, dtype: torch.dtype) -> None:
        with on_device(CPU), META:
            super().__init__(transformer_config(hf_config, dtype=dtype, ops=PLAIN), hf_config, head=head)  # which nothing runs
        self.hf_config = hf_config
        self.read: Callable[[str], torch.Tensor] = super().get_parameter
        self._present: dict[str, torch.nn.Parameter] = {}

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter with its bytes. The one asked for before loses them."""
        if target not in self._present:
            self._present.clear()
            self._present[target] = torch.nn.Parameter(self.read(target), requires_grad=False)
        return self._present[target]

    def shards(self) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """megatron's shards of every parameter, by its name."""
        with on_device(CPU):
            state = self.sharded_state_dict(metadata=sharding_metadata())
        return {name: state[name] for name, _ in self.named_parameters()}

    def content(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What gives a view of a parameter, as the shards hold them, its bytes, in memory that is the caller's."""
        names = {StorageWeakRef(parameter.untyped_storage()): name for name, parameter in self.named_parameters()}

        def content(view: torch.Tensor) -> torch.Tensor:
            parameter = self.get_parameter(names[StorageWeakRef(view.untyped_storage())]).detach()
            own = parameter.as_strided(view.shape, view.stride(), view.storage_offset())
            if own.numel() < parameter.numel():
                return own.clone(memory_format=torch.contiguous_format)  # its other parts are asked for next
            self._present.clear()
            return own

        return content


def read_hugging_face(model: StreamedModel, source: TensorFiles) -> None:
    """Let the model read its parameters from a Hugging Face directory. UserError where its tensors do not fit."""
    plan = weight_plan([model], model.hf_config)
    check_source(source, plan, model, model.hf_config)
    empty = dict(model.named_parameters())

    def read(name: str) -> torch.Tensor:
        parameter = torch.empty_like(empty[name], device=CPU, requires_grad=False)
        for entry in plan:
            if entry.parameter == name:
                fill(parameter, entry, source, model, model.hf_config)
        return parameter

    model.read = read


def read_megatron(model: StreamedModel, info: CheckpointInfo) -> None:
    """Let the model read its parameters from a Megatron checkpoint."""
    shards = model.shards()

    def read(name: str) -> torch.Tensor:
        parameter = torch.empty_like(shards[name].data, device=CPU, requires_grad=False)
        shard = replace(shards[name], data=parameter)
        for part in nested_values(shard.build() if isinstance(shard, ShardedTensorFactory) else [shard]):
            load_checkpoint(info, {name: part})  # into the parameter's memory
        return parameter

    model.read = read


def save_megatron(model: StreamedModel, directory: Path, *, run: dict[str, object]) -> None:
    """Write what the model reads as a Megatron checkpoint of no step, with `run` as its record."""
    store = CheckpointStore(directory)
    store.claim()
    store.save_checkpoint(step=0, state={"model": model.shards()}, files={"relax_run.json": run}, content=model.content())


def differences(model: StreamedModel, source: TensorFiles) -> Iterator[tuple[str, float]]:
    """For every tensor, its name and the largest absolute difference of what the model reads and what the directory holds.

    Both are taken in the model's dtype; NaN differs by infinity from anything but the same NaN. UserError where names or
    shapes differ.
    """
    check_source(source, weight_plan([model], model.hf_config), model, model.hf_config)
    for name, ours in hf_tensors([model], model.hf_config):
        assert ours is not None
        yield name, _largest_difference(ours, source.read(name, axis=None, first=0, size=0).to(ours.dtype))
        del ours  # and with it its parameter's memory, before the next one is read


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    largest = 0.0
    for x, y in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        apart = (x.double() - y.double()).abs().masked_fill_(x.view(bits) == y.view(bits), 0).nan_to_num(nan=math.inf)
        largest = max(largest, float(apart.max()))
    return largest
