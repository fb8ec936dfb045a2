"""A Hugging Face directory's safetensors files: read slice by slice, written in shards.

Tensors come by name from `model.safetensors` or from the files its index names. A read touches the bytes of its slice
alone, and one file at a time is mapped into memory, of which little stays: pages that were read count as memory until
they are unmapped. Writing takes the memory of one tensor. Nothing pickled is ever opened.

Invariants:
- Only regular files of the directory itself are opened, whatever an index or a link names. A Hugging Face cache's snapshot
  is links to the files of its `blobs`, which count as its own.
- A header that does not describe its file to the last byte is refused (by safetensors), and so is a tensor that two have.
"""

import functools
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from relax.cli.places import real
from relax.errors import UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAPPED_BYTES = 1 << 26  # read through one mapping


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies, and what its file's header says of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a directory's safetensors files, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stored: dict[str, _Stored] = {}
        for path in _weight_files(directory):
            file = _opened(path)
            for name in list(file.keys()):
                if name in self._stored:
                    raise UserError(
                        f"{path}: has {_shown(name)}, as {self._stored[name].path.name} does; copy the checkpoint again"
                    )
                view = file.get_slice(name)
                self._stored[name] = _Stored(path, tuple(view.get_shape()), view.get_dtype())
        self._mapped: tuple[Path, Any] | None = None
        self._touched = 0  # bytes of the mapping, at most

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every tensor as it is."""
        found = [DTYPES[stored.dtype] for stored in self._stored.values() if stored.dtype in DTYPES]
        return functools.reduce(torch.promote_types, found or [torch.float32])

    def check(self, expected: dict[str, tuple[int, ...]], *, ignored: set[str]) -> None:
        """UserError unless the tensors are `expected` (name -> shape) and floating point, `ignored` ones aside."""
        # Old Llama checkpoints keep the rotary table, which the config determines.
        found = {name for name in self._stored if not name.endswith("rotary_emb.inv_freq")} - ignored
        stored = {name: self._stored[name] for name in expected if name in found}
        problems = {
            "missing": [name for name in expected if name not in found],
            "unexpected": [_shown(name) for name in sorted(found - expected.keys())],
            "wrong shape": [
                f"{name} {list(tensor.shape)} (the config says {list(expected[name])})"
                for name, tensor in stored.items()
                if tensor.shape != expected[name]
            ],
            "not floating point (quantized? save it dequantized)": [
                f"{name} {tensor.dtype}" for name, tensor in stored.items() if tensor.dtype not in DTYPES
            ],
        }
        told = [
            f"{problem}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for problem, names in problems.items()
            if names
        ]
        if told:
            raise UserError(f"{self.directory}: the weights do not fit its config.json; {'; '.join(told)}")

    def read(self, name: str, *, axis: int | None, first: int, size: int) -> torch.Tensor:
        """Of a tensor [first, first + size) along `axis` (0 or 1), as much of it as there is; everything for None."""
        path, shape = self._stored[name].path, self._stored[name].shape
        if self._mapped is None or self._mapped[0] != path or self._touched > MAPPED_BYTES:
            self._mapped = None  # unmapped before the next one is mapped
            self._mapped, self._touched = (path, _opened(path)), 0
        view = self._mapped[1].get_slice(name)
        if axis is None:
            piece: torch.Tensor = view[:]
        else:
            span = slice(min(first, shape[axis]), min(first + size, shape[axis]))
            piece = view[span] if axis == 0 else view[:, span]
        self._touched += piece.nbytes
        return piece


def _opened(path: Path) -> Any:
    """A safetensors file, its header read."""
    _check_place(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: unreadable or cut short ({_shown(str(error))}); copy the checkpoint again, whole") from None


def _check_place(path: Path) -> None:
    """UserError unless it is a regular file in the directory that names it."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        raise UserError(f"{path}: named in the index but absent; copy the checkpoint again, whole") from None
    except OSError as error:
        raise UserError(f"{path}: unreadable ({error.strerror}); copy the checkpoint again, whole") from None
    if not regular:
        raise UserError(f"{path}: not a file; copy the checkpoint again, whole")
    directory = real(path.parent)
    homes = [directory, *([directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else [])]
    if real(path).parent not in homes:
        raise UserError(f"{path}: a link that leaves the model's directory, to {real(path)}; put the file there itself")


def _shown(text: str) -> str:
    """What a file says, as a message repeats it: a line of what can be printed, and not without end."""
    line = "".join(character if character.isprintable() else "?" for character in text[:200])
    return line + "..." * (len(text) > 200)


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if os.path.lexists(single):
        return [single]
    if os.path.lexists(index):
        _check_place(index)
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            problem = _shown(repr(error))
            raise UserError(f"{index}: not a safetensors index ({problem}); copy the checkpoint again, whole") from None
        for name in names:
            if not isinstance(name, str) or "\0" in name or name in ("", "..") or Path(name).name != name:
                raise UserError(
                    f"{index}: names {_shown(repr(name))}, which is no file of this directory; do not use this model"
                )
        return [directory / name for name in names]
    if any(directory.glob("*.bin")):
        raise UserError(
            f"{directory}: only pickled weights (.bin), which can run code and are never read; if you trust them, "
            "convert them once: AutoModelForCausalLM.from_pretrained(directory).save_pretrained(new_directory)"
        )
    raise UserError(f"{directory}: no model.safetensors and no model.safetensors.index.json there")


def write_tensors(
    directory: Path,
    tensors: Iterator[tuple[str, torch.Tensor | None]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor has its own) and their index.

    shapes: of all `tensors`, in their order. A file begins with what it holds: known before, each tensor can go to the
    disk as it comes, and is let go before the next one is asked for.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = _shards(sizes, shard_bytes)
    count = len(shards)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        with (directory / file).open("wb") as stream:
            stream.write(_header({name: shapes[name] for name in names}, dtype))
            for name in names:
                stream.write(_content(*next(tensors), name=name, shape=shapes[name], dtype=dtype))
    if count > 1:
        where = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """The names by file, in order."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """A safetensors file up to its first tensor: the header's length, and as JSON where each tensor lies behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    return struct.pack("<Q", len(text)) + text


def _content(given: str, tensor: torch.Tensor | None, *, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> memoryview:
    """The tensor's bytes."""
    assert tensor is not None
    assert (given, tuple(tensor.shape), tensor.dtype) == (name, shape, dtype), f"{given} where {name} {shape} was planned"
    return tensor.contiguous().view(torch.uint8).numpy().data
