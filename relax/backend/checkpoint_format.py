"""megatron-core's `torch_dist` checkpoint format, written in this process and read without running code from it.

megatron's own writer spawns a manager process (seconds on the first save) and forks writers; its own reader unpickles
`.metadata` and byte entries without limits. Both sit on torch's distributed checkpoint, whose planners, writer and
reader are used here on megatron's sharded tensors, so that the files are the same.

Invariants:
- `common.pt` and tensors load with `weights_only=True`, `.metadata` as `checkpoint_metadata` says. Each file is read once:
  nothing reads it again without these limits.
- Sharded state is tensors only, on disk and in memory.
- A rank that fails to write reports it: errors are returned to the caller in its own process.
"""

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from relax.backend.checkpoint_metadata import REFUSAL, Incomplete
from relax.errors import UserError

COMMON, CONFIG = "common.pt", "metadata.json"
CONFIG_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Content = Callable[[torch.Tensor], torch.Tensor]


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
        _load_plain(io.BytesIO(content))
    except pickle.UnpicklingError as error:
        raise ValueError("a value beside the sharded tensors does not load with weights only") from error
    return content


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
                shards[shard.key].append(_with_all_axes(shard))
        # One thread: torch loses the errors of the others. Copying ahead from a background thread would wake GPU 0, and
        # `content` is to be asked for a tensor only once the one before is written.
        ahead = 0 if snapshot or content else 10_000_000  # bytes; torch's default
        self._writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=ahead)
        self._planner = _SavePlanner(content)
        rank, coordinates = dist.get_rank(), dist.get_rank() == 0
        self._planner.set_up_planner(mcore_to_pyt_state_dict(shards), is_coordinator=coordinates)
        self._writer.set_up_storage_writer(coordinates)
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, self._planner.create_local_plan())
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[rank])

    def write(self) -> list[WriteResult]:
        """Write and sync this rank's file. No collective."""
        if not self._plan.items:
            return []
        results: list[WriteResult] = self._writer.write_data(self._plan, self._planner).value()
        return results

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write and sync `.metadata` from the results of all ranks."""
        self._writer.finish(self._metadata, results)


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


def read_shards(request: dict[str, Any], directory: Path, metadata: Metadata, *, where: str) -> None:
    """Read every sharded tensor of `request` and put the tensor [local shape] in its place. Collective.

    UserError, which calls the checkpoint `where`, for damage.
    """
    shards: dict[str, list[ShardedTensor]] = defaultdict(list)
    for shard in nested_values(request):
        if shard.data is None:
            shard.init_data("cpu")
        shards[shard.key].append(_with_all_axes(shard))
    every = [shard for group in shards.values() for shard in group]
    planner = MCoreLoadPlanner(
        shapes_validation_sharded_tensors=[shard for shard in every if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in every if shard.allow_shape_mismatch},
    )
    try:
        dcp.load(
            mcore_to_pyt_state_dict(shards, is_loading=True),
            storage_reader=_Reader(directory, metadata),
            planner=planner,
        )
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        text = f"{where}: rank {rank} cannot read it ({type(cause).__name__}: {cause})"
        raise UserError(f"{text}; it is damaged or not made of tensors alone") from error
    dict_list_map_inplace(lambda shard: shard.data.detach().view(shard.local_shape), request)


def _with_all_axes(shard: ShardedTensor) -> ShardedTensor:
    """The shard in as many axes as its whole tensor has (that of all layers): only so may a rank hold some of them."""
    first = (1,) * shard.prepend_axis_num
    shape = first + tuple(shard.local_shape)
    return replace(shard, data=shard.data.view(shape), local_shape=shape, prepend_axis_num=0)


class _Reader(dcp.FileSystemReader):
    """torch's reader, whose tensors load with weights only, on metadata that was read already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def read_config(directory: Path) -> None:
    """Check `metadata.json`. Incomplete where the checkpoint is unfinished or damaged; UserError for another format."""
    try:
        config = json.loads((directory / CONFIG).read_bytes())
        found = {key: config[key] for key in ("sharded_backend", "sharded_backend_version")}
    except FileNotFoundError:
        raise Incomplete(f"it has no {CONFIG}", finished=False) from None
    except (ValueError, KeyError, TypeError) as error:
        raise Incomplete(f"its {CONFIG} cannot be read ({error})") from None
    if found != {key: CONFIG_CONTENT[key] for key in found}:
        raise UserError(
            f"{directory}: a {found['sharded_backend']} checkpoint (version {found['sharded_backend_version']}); only "
            "torch_dist version 1 can be read; convert it with Megatron-LM"
        )


def read_common(directory: Path) -> dict[str, Any]:
    """`common.pt`, with weights only. Incomplete where it is missing or damaged; UserError where it asks for code."""
    path = directory / COMMON
    try:
        common = _load_plain(path.open("rb"))
    except FileNotFoundError:
        raise Incomplete(f"it has no {COMMON}") from None
    except Exception as error:  # damaged bytes raise nearly anything
        if asked := re.search(r"nsupported (?:global: )?GLOBAL (\S+)", str(error)):
            raise UserError(f"{path} asks for {asked[1]}: {REFUSAL}") from None
        raise Incomplete(f"its {COMMON} cannot be read ({type(error).__name__})") from None
    if not isinstance(common, dict):
        raise Incomplete(f"its {COMMON} holds no names")
    return common


def _load_plain(file: IO[bytes]) -> Any:
    """torch.load of tensors and plain values alone: no code, nor the classes that libraries registered as safe."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with file:
            return torch.load(file, map_location="cpu", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(registered)


def json_bytes(content: dict[str, Any]) -> bytes:
    """A JSON file's bytes."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
