"""Checksums of a checkpoint: written before it becomes visible, checked as it is read.

`checksums.json` has one for each small file and one for each tensor's bytes in the large ones. So a tensor is checked by
the rank that reads it, when it reads it: nothing is read that is not needed, and nothing from the disk twice. They find
damage, and keep no one from changing a checkpoint who wants to.

    {"algorithm": "xxh3_64", "files": {"common.pt": digest}, "tensors": {"__0_0.distcp": {"offset": digest}},
     "own": digest}
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from relax.backend.checkpoint.metadata import Damaged, Extent, Incomplete

CHECKSUMS, ALGORITHM = "checksums.json", "xxh3_64"
_PIECE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Checksums:
    """files: name -> digest; tensors: file -> offset, as text -> digest."""

    files: dict[str, str]
    tensors: dict[str, dict[str, str]]

    def check(self, name: str, content: bytes) -> None:
        """Damaged where a small file holds other bytes than were saved."""
        if name in self.files and digest(content) != self.files[name]:
            raise Damaged(f"its {name} does not hold what was saved (the checksum differs)")

    def check_tensor(self, key: str, extent: Extent, stream: IO[bytes]) -> None:
        """Damaged where the bytes of a tensor, which `stream` gives, are others than were saved."""
        if self.tensors.get(extent.file, {}).get(str(extent.offset)) != stream_digest(stream):
            raise Damaged(f"its file {extent.file} does not hold what was saved (the checksum of {key} differs)")


def read_checksums(directory: Path) -> Checksums | None:
    """None for a checkpoint without them; Damaged where they cannot be read, Incomplete where a file of theirs is missing."""
    try:
        content = json.loads((directory / CHECKSUMS).read_bytes())
        if content["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {content['algorithm']!r:.40}")
        if content.pop("own") != _own(content):
            raise ValueError("its own checksum differs")
        files, tensors = content["files"], content["tensors"]
        if not all(isinstance(names, dict) for names in (files, tensors, *tensors.values())):
            raise ValueError("a list instead of names")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"its {CHECKSUMS} cannot be read ({error})") from None
    for name in (*files, *tensors):
        if not (directory / name).is_file():
            raise Incomplete(f"its file {name} is missing")
    return Checksums(files, tensors)


def checksums_content(directory: Path, tensors: Iterable[tuple[Extent, str]]) -> dict[str, Any]:
    """What `checksums.json` says of the small files in `directory`, and of the tensors' bytes (digests)."""
    by_file: dict[str, dict[str, str]] = {}
    for extent, saved in tensors:
        by_file.setdefault(extent.file, {})[str(extent.offset)] = saved
    files = {path.name: digest(path.read_bytes()) for path in sorted(directory.iterdir()) if path.name not in by_file}
    content = {"algorithm": ALGORITHM, "files": files, "tensors": by_file}
    return {**content, "own": _own(content)}


def _own(content: dict[str, Any]) -> str:
    """A damaged name would otherwise look like a file that is missing."""
    return digest(json.dumps(content, sort_keys=True).encode())


def digest(content: bytes) -> str:
    """The checksum of some bytes."""
    return xxhash.xxh3_64_hexdigest(content)


def stream_digest(stream: IO[bytes]) -> str:
    """The checksum of what a stream still gives."""
    state = xxhash.xxh3_64()
    while piece := stream.read(_PIECE):
        state.update(piece)
    return state.hexdigest()
