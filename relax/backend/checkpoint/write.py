"""Writes megatron-core's `torch_dist` checkpoint format in this process.

megatron's own writer spawns a manager process (seconds on the first save) and forks writers. It sits on torch's distributed
checkpoint, whose planner and writer are used here on megatron's sharded tensors, so that the files are the same.

Invariants:
- Sharded state is tensors only, on disk and in memory, and what is beside it loads with weights only.
- A rank that fails to write reports it: errors are returned to the caller in its own process.
"""

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from relax.backend.checkpoint.file_checksums import stream_digest
from relax.backend.checkpoint.metadata import Extent

COMMON, CONFIG = "common.pt", "metadata.json"
CONFIG_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Content = Callable[[torch.Tensor], torch.Tensor]
Written = list[tuple[WriteResult, Extent, str]]  # of each tensor: torch's record, its bytes' place and checksum


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sharded tensors, plain values) of a state to save, both nested as in `state`. Collective; uses `state` up."""
    tensors, plain = save_preprocess(without_objects(state)[1])
    return tensors, plain


def without_objects(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(empty sharded objects, everything else). megatron's layers carry empty extra states, which are not stored."""
    objects, rest = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    for value in nested_values(objects):
        if not (value.data is None or (torch.is_tensor(value.data) and value.data.numel() == 0)):
            raise ValueError(f"sharded object {value.key}: sharded state must be tensors; give other values unsharded")
    return objects, rest


def pack_common(plain: dict[str, Any]) -> bytes:
    """The bytes of `common.pt`; ValueError for a value that would not load with weights only."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    content = buffer.getvalue()
    try:
        load_plain(io.BytesIO(content))
    except pickle.UnpicklingError as error:
        raise ValueError("a value beside the sharded tensors does not load with weights only") from error
    return content


def bytes_of(file: io.BufferedReader, extent: Extent) -> IO[bytes]:
    """A stream of a tensor's bytes in its open file."""
    return cast(IO[bytes], _create_file_view(file, extent.offset, extent.length))


def load_plain(stream: IO[bytes]) -> Any:
    """torch.load of tensors and plain values alone: no code, nor the classes that libraries registered as safe."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(registered)


class ShardWriter:
    """Writes one checkpoint's sharded tensors: made on all ranks, `write` on each, `finish` on rank 0.

    `snapshot` copies the tensors, so that training may go on while `write` runs in a thread. `content` gives each tensor's
    bytes when its turn comes, for tensors that have none (on the meta device), in memory that is then the writer's.
    """

    def __init__(
        self, tensors: dict[str, Any], directory: Path, *, snapshot: bool = False, content: Content | None = None
    ) -> None:
        shards: dict[str, list[ShardedTensor]] = defaultdict(list)
        for shard in nested_values(tensors):
            if is_main_replica(shard.replica_id):
                if snapshot:
                    shard.data = shard.data.detach().to("cpu", copy=True)
                shards[shard.key].append(with_all_axes(shard))
        # One thread: torch loses the errors of the others. Copying ahead from a background thread would wake GPU 0, and
        # `content` is to be asked for a tensor only once the one before is written.
        ahead = 0 if snapshot or content else 10_000_000  # bytes; torch's default
        self._directory = directory
        self._writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=ahead)
        self._planner = _SavePlanner(content)
        rank, coordinates = dist.get_rank(), dist.get_rank() == 0
        self._planner.set_up_planner(mcore_to_pyt_state_dict(shards), is_coordinator=coordinates)
        self._writer.set_up_storage_writer(coordinates)
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, self._planner.create_local_plan())
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[rank])

    def write(self) -> Written:
        """Write and sync this rank's file, and take the checksums of what is in it. No collective."""
        if not self._plan.items:
            return []
        return [self._with_checksum(result) for result in self._writer.write_data(self._plan, self._planner).value()]

    def _with_checksum(self, result: WriteResult) -> tuple[WriteResult, Extent, str]:
        place = result.storage_data
        extent = Extent(place.relative_path, place.offset, place.length)
        with (self._directory / extent.file).open("rb") as file:  # just written: it is still in memory
            return result, extent, stream_digest(bytes_of(file, extent))

    def finish(self, written: list[Written]) -> None:
        """Write and sync `.metadata` from what all ranks wrote."""
        self._writer.finish(self._metadata, [[result for result, _, _ in one] for one in written])


class _SavePlanner(MCoreSavePlanner):
    """Tensors as they are, or as `content` gives them, one after another."""

    def __init__(self, content: Content | None) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._content = content
        self._given = torch.empty(0)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if self._content is None:
            return found
        self._given.untyped_storage().resize_(0)  # it is written; torch's writer would keep it to the end of its file
        self._given = self._content(found)
        return self._given


def with_all_axes(shard: ShardedTensor) -> ShardedTensor:
    """The shard in as many axes as its whole tensor has (that of all layers): only so may a rank hold some of them."""
    first = (1,) * shard.prepend_axis_num
    shape = first + tuple(shard.local_shape)
    return replace(shard, data=shard.data.view(shape), local_shape=shape, prepend_axis_num=0)


def json_bytes(content: dict[str, Any]) -> bytes:
    """A JSON file's bytes."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
