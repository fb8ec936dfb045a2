"""The metadata of a `torch_dist` checkpoint: what it holds and in which files, read without running code from it.

torch's own reader unpickles `.metadata` without limits. Here it is parsed as data (`inert_pickle`), and the few values that
loading needs are copied, each of exactly the type that it must have, into metadata made anew; what else the file holds is
left alone. Every file that it names must be there, beside it, in full.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from relax.backend.checkpoint.inert_pickle import Name, Record, UnknownName, parse
from relax.errors import UserError

METADATA = ".metadata"
REFUSAL = "a checkpoint needs no such thing, and loading it could run code; relax refuses to read it"


class Incomplete(Exception):
    """A directory that lacks a part of a checkpoint; `finished` tells one that was whole from a save cut short."""

    def __init__(self, reason: str, *, finished: bool = True) -> None:
        super().__init__(reason)
        self.finished = finished


class Damaged(Exception):
    """A file of a checkpoint is there and holds something else than what was saved."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a file of the checkpoint holds a tensor's chunk: `length` bytes from `offset`."""

    file: str
    offset: int
    length: int


def read_metadata(directory: Path, content: bytes) -> Metadata:
    """What `.metadata`, which holds `content`, says; `storage_data` maps each chunk to its Extent.

    UserError where it asks for code or other files, Damaged where it is no metadata, Incomplete where a file lacks bytes.
    """
    path = directory / METADATA
    try:
        metadata = _metadata(parse(content, _NAMES))
    except UnknownName as error:
        raise UserError(f"{path} asks for {error}: {REFUSAL}") from None
    except UnpicklingError as error:
        raise Damaged(f"its {METADATA} cannot be read ({error})") from None
    for name, size in _file_sizes(metadata).items():
        if Path(name).name != name or name == "..":
            raise UserError(f"{path} names a file outside the checkpoint: {name!r}; refusing to read it")
        if not (directory / name).is_file():
            raise Incomplete(f"its file {name} is missing")
        if (actual := (directory / name).stat().st_size) < size:
            raise Incomplete(f"its file {name} has {actual} bytes of {size}")
    return metadata


def _file_sizes(metadata: Metadata) -> dict[str, int]:
    """File name -> the bytes that its entries reach."""
    sizes: dict[str, int] = defaultdict(int)
    for extent in metadata.storage_data.values():
        sizes[extent.file] = max(sizes[extent.file], extent.offset + extent.length)
    return sizes


_TORCH = "torch.distributed.checkpoint"
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {
    *_DTYPES,
    "torch.Size",
    "torch.serialization._get_layout",
    *(
        f"{_TORCH}.metadata.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(f"{_TORCH}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"{_TORCH}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    "builtins.getattr",  # of an enumeration, as Python 3.11 pickles its members
    "pathlib.Path",
    "pathlib.PosixPath",
}


def _metadata(root: Any) -> Metadata:
    """The metadata that a parsed file describes; UnpicklingError where it does not."""
    state = _state(root, "metadata.Metadata")
    entries = _plain(state.get("state_dict_metadata"), dict)
    storage: dict[MetadataIndex, Extent] = {}
    for index, info in _plain(state.get("storage_data"), dict).items():
        storage[_index(index)] = _extent(info)
    return Metadata({_plain(key, str): _entry(key, entry, storage) for key, entry in entries.items()}, storage_data=storage)


def _entry(key: str, entry: Any, storage: dict[MetadataIndex, Extent]) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(entry, "metadata.BytesStorageMetadata"):
        return BytesStorageMetadata()
    state = _state(entry, "metadata.TensorStorageMetadata")
    size, chunks, seen = _size(state.get("size")), [], set[torch.Size]()
    for chunk in _plain(state.get("chunks"), list):
        part = _state(chunk, "metadata.ChunkStorageMetadata")
        offsets, sizes = _size(part.get("offsets")), _size(part.get("sizes"))
        fits = len(offsets) == len(sizes) == len(size) and all(o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True))
        if not fits or offsets in seen or MetadataIndex(key, offsets) not in storage:
            raise UnpicklingError(f"a chunk of {key!r:.200} is not in the tensor, or not in a file")
        seen.add(offsets)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(state.get("properties"))), size, chunks)


def _index(index: Any) -> MetadataIndex:
    state = _state(index, "metadata.MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_plain(state.get("fqn"), str), None if offset is None else _size(offset))


def _extent(info: Any) -> Extent:
    state = _state(info, "filesystem._StorageInfo")
    offset, length = _whole(state.get("offset")), _whole(state.get("length"))
    if state.get("transform_descriptors"):
        raise UnpicklingError("its tensors are stored compressed or otherwise changed")
    return Extent(_plain(state.get("relative_path"), str), offset, length)


def _dtype(properties: Any) -> torch.dtype:
    if not (_is(properties, "metadata.TensorProperties") and type(properties.state) is tuple and properties.state):
        raise UnpicklingError("a tensor without properties")
    name = _plain(properties.state[0], Name)
    if name not in _DTYPES:
        raise UnpicklingError(f"{name} is no dtype")
    return _DTYPES[name]


def _size(size: Any) -> torch.Size:
    if not (type(size) is Record and size.name == "torch.Size" and len(size.args) == 1):
        raise UnpicklingError("something else instead of a size")
    return torch.Size([_whole(number) for number in _plain(size.args[0], tuple)])


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise UnpicklingError("something else instead of a size or offset")
    return number


def _is(record: Any, name: str) -> bool:
    return type(record) is Record and record.name == f"{_TORCH}.{name}" and record.args == ()


def _state(record: Any, name: str) -> dict[Any, Any]:
    """The fields of a dataclass's record."""
    if not _is(record, name):
        raise UnpicklingError(f"something else instead of {name}")
    return _plain(record.state, dict)


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise UnpicklingError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def tensor_sizes(metadata: Metadata) -> dict[str, tuple[int, ...] | None]:
    """Key -> global shape of every sharded entry; None for bytes."""
    return {key: tensor_size(metadata, key) for key in metadata.state_dict_metadata}


def tensor_size(metadata: Metadata, key: str) -> tuple[int, ...] | None:
    """The global shape of an entry; None for bytes."""
    entry = metadata.state_dict_metadata[key]
    return tuple(entry.size) if type(entry) is TensorStorageMetadata else None


def is_covered(metadata: Metadata, key: str) -> bool:
    """Whether the chunks of a tensor make all of it."""
    entry: Any = metadata.state_dict_metadata[key]
    return sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)


def tensor_dtype(metadata: Metadata, keys: Iterable[str]) -> torch.dtype:
    """The narrowest floating-point dtype that holds the tensors under `keys` as they are; float32 where there is none."""
    entries = [metadata.state_dict_metadata[key] for key in keys]
    dtypes = {entry.properties.dtype for entry in entries if type(entry) is TensorStorageMetadata}
    return functools.reduce(torch.promote_types, [dtype for dtype in dtypes if dtype.is_floating_point] or [torch.float32])
