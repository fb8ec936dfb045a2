"""Reads the files of a `torch_dist` checkpoint, without running code from them.

Invariants:
- `common.pt` and tensors load with `weights_only=True` and without the classes that libraries registered as safe, from
  torch's zip format alone; bytes among the sharded entries are never loaded.
- What is read is first compared with its checksum, where there is one.
- No message repeats torch's advice on `weights_only`.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from relax.backend.checkpoint.file_checksums import Checksums
from relax.backend.checkpoint.metadata import REFUSAL, Damaged, Extent, Incomplete
from relax.backend.checkpoint.write import COMMON, CONFIG, CONFIG_CONTENT, bytes_of, load_plain, with_all_axes
from relax.errors import UserError

_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Contents:
    """What the small files of a checkpoint say, read once. common: plain values, {} of a checkpoint made elsewhere."""

    metadata: Metadata
    common: dict[str, Any]
    checksums: Checksums | None


def read_small(directory: Path, name: str, checksums: Checksums | None, *, finished: bool = True) -> bytes:
    """A small file's bytes. Incomplete where it is missing or cut short, Damaged where it is not what was saved."""
    try:
        content = (directory / name).read_bytes()
    except FileNotFoundError:
        raise Incomplete(f"it has no {name}", finished=finished) from None
    if checksums:
        checksums.check(name, content)
    return content


def check_config(directory: Path, content: bytes) -> None:
    """Check what `metadata.json` holds. Damaged where it is none; UserError for another format."""
    try:
        config = json.loads(content)
        found = {key: config[key] for key in ("sharded_backend", "sharded_backend_version")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"its {CONFIG} cannot be read ({error})") from None
    if found != {key: CONFIG_CONTENT[key] for key in found}:
        raise UserError(
            f"{directory}: a {found['sharded_backend']} checkpoint (version {found['sharded_backend_version']}); only "
            "torch_dist version 1 can be read; convert it with Megatron-LM"
        )


def read_common(directory: Path, stream: IO[bytes]) -> dict[str, Any]:
    """The plain values of `common.pt`, which `stream` gives. UserError where it asks for code, else Damaged."""
    common = _load(stream, directory / COMMON)
    if type(common) is not dict:
        raise Damaged(f"its {COMMON} holds no names")
    return common


def _load(stream: IO[bytes], path: Path) -> Any:
    """torch.load of tensors and plain values alone, with the errors of `read_common`."""
    if stream.read(len(_ZIP)) != _ZIP:
        raise Damaged(f"its {path.name} is not what torch.save writes: it is damaged, or made to run code")
    stream.seek(0)
    try:
        return load_plain(stream)
    except Exception as error:  # damaged bytes raise nearly anything
        if asked := re.search(r"nsupported (?:global: )?GLOBAL (\S+)", str(error)):
            raise UserError(f"{path} asks for {asked[1]}: {REFUSAL}") from None
        raise Damaged(
            f"its {path.name} cannot be read ({type(error).__name__}): it is damaged, or not of tensors and plain values alone"
        ) from None


def read_shards(request: dict[str, Any], directory: Path, contents: Contents) -> None:
    """Read every sharded tensor of `request` and put the tensor [local shape] in its place. Collective.

    Damaged or UserError, the same on every rank, where one of them cannot read what it needs.
    """
    shards: dict[str, list[ShardedTensor]] = defaultdict(list)
    for shard in nested_values(request):
        if shard.data is None:
            shard.init_data("cpu")
        shards[shard.key].append(with_all_axes(shard))
    every = [shard for group in shards.values() for shard in group]
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[shard for shard in every if not shard.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={shard.key: shard for shard in every if shard.allow_shape_mismatch},
    )
    state = mcore_to_pyt_state_dict(shards, is_loading=True)
    try:
        dcp.load(state, storage_reader=_Reader(directory, contents), planner=planner)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, (UserError, Damaged)):
            raise cause from None
        if isinstance(cause, OSError):
            raise UserError(f"{directory}: rank {rank} cannot read {cause.filename}: {cause.strerror}") from None
        raise
    dict_list_map_inplace(lambda shard: shard.data.detach().view(shard.local_shape), request)


class _LoadPlanner(MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """megatron's would unpickle them."""
        raise UserError(f"the checkpoint holds {read_item.dest_index.fqn} as bytes, not as a tensor: {REFUSAL}")


class _Reader(dcp.StorageReader):
    """Reads tensors, each from its own bytes, once."""

    def __init__(self, directory: Path, contents: Contents) -> None:
        self._directory, self._contents = directory, contents

    def read_metadata(self) -> Metadata:
        return self._contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        chunks: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            chunks[item.storage_index].append(item)
        for index in sorted(chunks, key=lambda index: (self._extent(index).file, self._extent(index).offset)):
            tensor = None
            for item in chunks[index]:
                if item.type != LoadItemType.TENSOR:
                    planner.load_bytes(item, BytesIO())  # refuses
                if tensor is None:
                    tensor = self._read(index)
                _fill(planner, item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _extent(self, index: MetadataIndex) -> Extent:
        extent: Extent = self._contents.metadata.storage_data[index]
        return extent

    def _read(self, index: MetadataIndex) -> torch.Tensor:
        """A chunk, whole."""
        extent = self._extent(index)
        path = self._directory / extent.file
        with path.open("rb") as file:
            if self._contents.checksums:
                self._contents.checksums.check_tensor(index.fqn, extent, bytes_of(file, extent))
            tensor = _load(bytes_of(file, extent), path)
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            raise Damaged(f"its file {extent.file} holds something else than a tensor for {index.fqn}")
        return tensor


def _fill(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    part = tuple(slice(first, first + size) for first, size in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    if tensor.dim() != len(part) or (source := tensor[part]).shape != target.shape:
        raise Damaged(f"its tensor {item.storage_index.fqn} has another shape in its file than its metadata says")
    target.copy_(source)
    planner.commit_tensor(item, target)
