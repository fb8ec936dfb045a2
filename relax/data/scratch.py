"""A hidden directory beside what is being written, so that a final name only ever shows something complete.

A process that is killed leaves its directory behind; the next one that writes beside it removes it.

Invariant: a directory whose writer lives is never removed. The writer holds a lock on it, which ends with its process;
whoever removes one must get that lock first, and a writer whose directory was removed before its lock makes another.
Where the file system has no locks, nothing is removed.
"""

import fcntl
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_HOST = re.sub(r"[^0-9A-Za-z-]", "-", socket.gethostname())


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """A new directory beside `target`, removed at the end unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in target.parent.iterdir():
        # This machine's alone: some file systems show a lock on the machine that holds it only.
        if re.fullmatch(rf"\..+\.{_HOST}\.[0-9a-f]{{32}}\.partial", entry.name) and entry.is_dir() and not entry.is_symlink():
            _remove_if_free(entry)
    directory, lock = _make(target)
    try:
        yield directory
    finally:
        os.close(lock)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def whole_file(target: Path) -> Iterator[IO[str]]:
    """A text file that takes its name when it is complete; until then an older one keeps it, and a link is not followed.

    Half of a surrogate pair, which JSON may hold and UTF-8 may not, is written as JSON's escape of it.
    """
    with scratch_directory(target) as directory:
        aside = directory / target.name
        with aside.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, target)


def _make(target: Path) -> tuple[Path, int]:
    """A directory, and the descriptor that holds its lock."""
    while True:
        directory = target.with_name(f".{target.name[:100]}.{_HOST}.{uuid.uuid4().hex}.partial")
        directory.mkdir()
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(descriptor) is not False and directory.exists():
            return directory, descriptor
        os.close(descriptor)


def _remove_if_free(directory: Path) -> None:
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    if _lock(descriptor):
        shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock was got; None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
