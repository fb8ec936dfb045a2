"""Checksums of a directory's files, in a file beside them: a bit that a disk flips must not become a training token.

XXH3-128, which goes as fast as memory, in the lines of `xxh128sum`, whose `-c` checks them too. It tells damage, not
forgery. Invariant: of a directory whose files are as they were written, `damage` says nothing; a file that was changed,
cut, added or taken away is named.
"""

import hashlib
import os
import stat
from pathlib import Path

import xxhash

from relax.errors import UserError

CHECKSUMS = "checksums.xxh128"


def file_checksum(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def write_checksums(directory: Path) -> None:
    """Describe every file of a directory that is complete."""
    lines = [f"{file_checksum(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
    with (directory / CHECKSUMS).open("w", encoding="ascii") as stream:
        stream.writelines(lines)
        stream.flush()
        os.fsync(stream.fileno())


def damage(directory: Path) -> str | None:
    """What is wrong with the files of a directory; None where all are as they were when their checksums were written."""
    try:
        lines = (directory / CHECKSUMS).read_text("ascii").splitlines()
        found = {file.name for file in directory.iterdir()} - {CHECKSUMS}
        said = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        if differing := sorted(found ^ said.keys()):
            return f"{differing[0]} is {'missing' if differing[0] in said else 'not one of its files'}"
        for name, checksum in said.items():
            if file_checksum(directory / name) != checksum:
                return f"{name} is not as it was written"
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    return None


def check_regular(path: Path) -> None:
    """Raise `UserError` for what is neither a file nor a directory of files: a link would be read, or written, elsewhere."""
    if not os.path.lexists(path):
        return
    is_directory = stat.S_ISDIR(path.lstat().st_mode)
    for file in path.iterdir() if is_directory else [path]:
        mode = file.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
            raise UserError(f"{file} is {kind}, and a cache holds files: remove it, or choose another --data-cache-dir")
