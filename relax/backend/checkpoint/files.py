"""Names inside a checkpoint directory, and writes that survive a kill or a power cut.

    DIRECTORY/latest_checkpointed_iteration.txt   the tracker: a step, or "release"
    DIRECTORY/iter_0000050/                       a checkpoint, whole since the moment it got this name
    DIRECTORY/release/                            Megatron's name for weights of no step, which we count as step 0
    DIRECTORY/.iter_0000050.tmp/                  being written or being deleted: never read, removed by the next save
    DIRECTORY/.iter_0000050.old/                  the former iter_0000050 while a new one takes its name

The hidden names are the same for every process, so that the next save finds what another left: one process at a time saves
into a directory (`CheckpointStore.claim`; on a network file system the claim holds among the processes of one machine).

Invariant: whatever moment a process dies at, every step saved before is still there whole, as `iter_*`, or as
`.iter_*.old` where a replacement was cut short between its two renames.
"""

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"(\.?)iter_(\d{7,})(\.old)?")


def iteration_name(step: int) -> str:
    """The directory's name of a step: iter_0000050, or release for step 0."""
    return f"iter_{step:07d}" if step else RELEASE


def aside(path: Path) -> Path:
    """The name under which the checkpoint `path` is written, and deleted."""
    return path.with_name(f".{path.name}.tmp")


def replaced(path: Path) -> Path:
    """The name that the former checkpoint `path` keeps while a new one takes its place."""
    return path.with_name(f".{path.name}.old")


def iterations(directory: Path) -> dict[int, Path]:
    """Step -> directory of every checkpoint that got its name, by step. Whether it is whole, its files say."""
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # visible names come before hidden ones, which only fill gaps
        match = _ITERATION.fullmatch(path.name)
        if match and bool(match[1]) == bool(match[3]) and path.is_dir():
            found.setdefault(int(match[2]), path)
    return dict(sorted(found.items()))


def unfinished(directory: Path) -> list[Path]:
    """What saves and deletions that were cut short left behind."""
    return sorted((*directory.glob(".iter_*.tmp"), *directory.glob(f".{RELEASE}.tmp")))


def remove_leftovers(directory: Path) -> None:
    """Delete what was left unfinished; give a checkpoint whose replacement was cut short its name back."""
    for path in unfinished(directory):
        shutil.rmtree(path)
    for path in sorted(directory.glob(".iter_*.old")):
        original = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if original.exists():
            discard(path, under=original)
        else:
            path.rename(original)


def discard(path: Path, *, under: Path | None = None) -> None:
    """Delete a checkpoint so that no moment shows half of it; `under` is the name whose `.tmp` it takes (its own)."""
    doomed = aside(under or path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def publish(written: Path, final: Path) -> None:
    """Give a directory whose files are all synced its final name, in place of a former one."""
    sync_directory(written)
    former = replaced(final)
    if final.exists():
        final.rename(former)
    written.rename(final)
    sync_directory(final.parent)
    if former.exists():
        discard(former, under=final)


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a new file, not what a link of its name leads to."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the former content or this one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    write_file(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
