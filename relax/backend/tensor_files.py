"""A Hugging Face directory's safetensors files: read slice by slice, written in shards.

Tensors come by name from `model.safetensors` or from the files its index names. A read touches the bytes of its slice
alone. Nothing pickled is ever opened.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from relax.errors import UserError


class TensorFiles:
    """The tensors of a directory's safetensors files, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(file.keys(), file))
            except FileNotFoundError:
                raise UserError(f"{path}: named in the index but absent; copy the checkpoint again, whole") from None
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: unreadable or cut short ({error}); copy the checkpoint again, whole") from None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, expected: dict[str, tuple[int, ...]], *, ignored: set[str]) -> None:
        """UserError unless the tensors are `expected` (name -> shape) and floating point, `ignored` ones aside."""
        # Old Llama checkpoints keep the rotary table, which the config determines.
        found = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")} - ignored
        views = {name: self._files[name].get_slice(name) for name in expected if name in found}
        problems = {
            "missing": [name for name in expected if name not in found],
            "unexpected": sorted(found - expected.keys()),
            "wrong shape": [
                f"{name} {view.get_shape()} (the config says {list(expected[name])})"
                for name, view in views.items()
                if tuple(view.get_shape()) != expected[name]
            ],
            "not floating point (quantized? save it dequantized)": [
                f"{name} {view.get_dtype()}"
                for name, view in views.items()
                if view.get_dtype() not in ("F64", "F32", "F16", "BF16")
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
        view = self._files[name].get_slice(name)
        shape = view.get_shape()
        if axis is None:
            return view[:]
        span = slice(min(first, shape[axis]), min(first + size, shape[axis]))
        return view[span] if axis == 0 else view[:, span]


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: not a safetensors index ({error!r}); copy the checkpoint again, whole") from None
    if any(directory.glob("*.bin")):
        raise UserError(
            f"{directory}: only pickled weights (.bin), which can run code and are never read; if you trust them, "
            "convert them once: AutoModelForCausalLM.from_pretrained(directory).save_pretrained(new_directory)"
        )
    raise UserError(f"{directory}: no model.safetensors and no model.safetensors.index.json there")


def write_tensors(directory: Path, tensors: Iterator[tuple[str, torch.Tensor]], *, shard_bytes: int = 5 * 10**9) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor has its own) and their index."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.contiguous()
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (directory / f"{i}.safetensors").rename(directory / file)
    where = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
