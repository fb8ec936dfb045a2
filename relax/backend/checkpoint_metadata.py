"""The metadata of a `torch_dist` checkpoint: what it holds and in which files, read without running code from it.

torch's own reader unpickles `.metadata` without limits. Here an unpickler admits the classes of metadata alone, and every
file that it names must be there, beside it, in full.
"""

import enum
import functools
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from relax.errors import UserError

METADATA = ".metadata"
REFUSAL = "a checkpoint needs no such thing, and loading it could run code; relax refuses to read it"


class Incomplete(Exception):
    """A directory that is no whole checkpoint; `finished` tells damage to a saved one from a save cut short."""

    def __init__(self, reason: str, *, finished: bool = True) -> None:
        super().__init__(reason)
        self.finished = finished


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


def tensor_sizes(metadata: Metadata) -> dict[str, tuple[int, ...] | None]:
    """Key -> global shape of every sharded entry; None for bytes."""
    return {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def tensor_dtype(metadata: Metadata, keys: Iterable[str]) -> torch.dtype:
    """The narrowest floating-point dtype that holds the tensors under `keys` as they are; float32 where there is none."""
    entries = [metadata.state_dict_metadata[key] for key in keys]
    dtypes = {entry.properties.dtype for entry in entries if isinstance(entry, TensorStorageMetadata)}
    return functools.reduce(torch.promote_types, [dtype for dtype in dtypes if dtype.is_floating_point] or [torch.float32])
