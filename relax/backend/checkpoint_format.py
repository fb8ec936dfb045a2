"""megatron-core's `torch_dist` checkpoint format, written in this process and read without running code from it.

megatron's own writer spawns a manager process (seconds on the first save) and forks writers; its own reader unpickles
`.metadata` and byte entries without limits. Both sit on torch's distributed checkpoint, whose planners, writer and
reader are used here on megatron's sharded tensors, so that the files are the same.

Invariants:
- `.metadata` is read through an unpickler that admits the classes of metadata alone; `common.pt` and tensors load with
  `weights_only=True`. Each file is read once: nothing reads it again without these limits.
- Sharded state is tensors only, on disk and in memory.
- A rank that fails to write reports it: errors are returned to the caller in its own process.
"""

import enum
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from relax.errors import UserError

COMMON, CONFIG, METADATA = "common.pt", "metadata.json", ".metadata"
REFUSAL = "a checkpoint needs no such thing, and loading it could run code; relax refuses to read it"
CONFIG_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class Incomplete(Exception):
    """A directory that is no whole checkpoint; `finished` tells damage to a saved one from a save cut short."""

    def __init__(self, reason: str, *, finished: bool = True) -> None:
        super().__init__(reason)
        self.finished = finished


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

    `snapshot` copies the tensors, so that training may go on while `write` runs in a thread.
    """

    def __init__(self, tensors: dict[str, Any], directory: Path, *, snapshot: bool) -> None:
        shards: dict[str, list[ShardedTensor]] = defaultdict(list)
        for shard in nested_values(tensors):
            if is_main_replica(shard.replica_id):
                if snapshot:
                    shard.data = shard.data.detach().to("cpu", copy=True)
                shards[shard.key].append(shard)
        # One thread: torch loses the errors of the others. Copying ahead from a background thread would wake GPU 0.
        ahead = 0 if snapshot else 10_000_000  # bytes; torch's default
        self._writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=ahead)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
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


def read_shards(request: dict[str, Any], directory: Path, metadata: Metadata, *, where: str) -> None:
    """Read every sharded tensor of `request` and put the tensor [local shape] in its place. Collective.

    UserError, which calls the checkpoint `where`, for damage.
    """
    shards: dict[str, list[ShardedTensor]] = defaultdict(list)
    for shard in nested_values(request):
        shards[shard.key].append(shard)
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
    dict_list_map_inplace(lambda shard: shard.data.view(shard.local_shape), request)


class _Reader(dcp.FileSystemReader):
    """torch's reader, whose tensors load with weights only, on metadata that was read already."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def read_metadata(directory: Path) -> Metadata:
    """`.metadata`, whose files are all there in full. Incomplete where not, UserError where it asks for code."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
        files = _file_sizes(metadata)
    except (UserError, FileNotFoundError) as error:
        raise error if isinstance(error, UserError) else Incomplete(f"it has no {METADATA}") from None
    except Exception as error:  # unpickling damaged bytes raises nearly anything
        raise Incomplete(f"its {METADATA} cannot be read ({type(error).__name__}: {error})") from None
    for name, size in files.items():
        if Path(name).name != name:
            raise UserError(f"{path} names a file outside the checkpoint: {name!r}; refusing to read it")
        if not (directory / name).is_file():
            raise Incomplete(f"its file {name} is missing")
        if (actual := (directory / name).stat().st_size) < size:
            raise Incomplete(f"its file {name} has {actual} bytes of {size}")
    return metadata


def _file_sizes(metadata: Metadata) -> dict[str, int]:
    """File name -> the bytes that its entries reach."""
    sizes: dict[str, int] = defaultdict(int)
    for entry in metadata.storage_data.values():
        sizes[entry.relative_path] = max(sizes[entry.relative_path], entry.offset + entry.length)
    return sizes


def _member(owner: Any, name: str) -> Any:
    """Python 3.11 pickles members of an enumeration as `getattr(owner, name)`; nothing else is looked up."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise pickle.UnpicklingError(f"getattr on {owner!r}")
    return owner[name]


def _path(*parts: str) -> str:
    return "/".join(parts)


_ADMITTED: dict[str, tuple[str, ...]] = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": (
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "collections": ("OrderedDict",),
}
_STAND_INS: dict[str, Callable[..., Any]] = {
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    "pathlib.Path": _path,
    "pathlib.PosixPath": _path,
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _STAND_INS:
            return _STAND_INS[f"{module}.{name}"]
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UserError(f"{self._path} asks for {module}.{name}: {REFUSAL}")


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


def tensor_sizes(metadata: Metadata) -> dict[str, tuple[int, ...] | None]:
    """Key -> global shape of every sharded entry; None for bytes."""
    return {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def json_bytes(content: dict[str, Any]) -> bytes:
    """A JSON file's bytes."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
