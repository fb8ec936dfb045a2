"""A hidden directory beside what is being written, so that a final name only ever shows something complete.

A process that is killed leaves its directory behind; the next one that writes beside it removes it.

Invariant: a directory whose writer lives is never removed. The writer holds a lock on it, which ends with its process;
directories are made and removed under a lock on their parent, so that none is seen between its making and its lock.
Where the file system has no locks, nothing is removed.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"\..+\.[0-9a-f]{32}\.partial")


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """A new directory beside `target`, removed at the end unless it was renamed."""
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    directory = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    making = _lock(parent, wait=True)
    try:
        if making is not None:
            _remove_leftovers(parent)
        directory.mkdir()
        held = _lock(directory, wait=False)
    finally:
        _unlock(making)
    try:
        yield directory
    finally:
        _unlock(held)
        shutil.rmtree(directory, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    for entry in parent.iterdir():
        if _NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            free = _lock(entry, wait=False)
            if free is not None:
                shutil.rmtree(entry, ignore_errors=True)
            _unlock(free)


def _lock(directory: Path, *, wait: bool) -> int | None:
    """An open descriptor that holds the directory's lock; None where another process has it, or there are no locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
