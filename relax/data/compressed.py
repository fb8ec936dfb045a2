"""Open a text data file, compressed or not, as a stream of bytes in bounded memory.

Invariant: a file that expands past all measure (a bomb: kilobytes that make gigabytes) is a `UserError` while it is
read, before it fills memory or the disk; what is cut or damaged is an `OSError`, never a shorter file.
"""

import io
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from relax.errors import UserError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
# Text compresses 3 to 10 times, rows that repeat each other some dozen times; bombs a thousand times and more.
MAX_RATIO = 200
ALWAYS_FINE = 256 << 20  # bytes that any file may expand to
_BLOCK = 128 << 10  # bytes


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, expanded where its name says that it is compressed."""
    compression = COMPRESSIONS.get(path.suffix)
    return path.open("rb") if compression is None else cast(BinaryIO, io.BufferedReader(_Expanded(path, compression), _BLOCK))


class _Expanded(io.RawIOBase):
    """A compressed file's content, counted as it is read."""

    def __init__(self, path: Path, compression: str) -> None:
        self._path = path
        self._limit = max(ALWAYS_FINE, MAX_RATIO * path.stat().st_size)
        self._stream = pa.input_stream(str(path), compression=compression)
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base takes any writable buffer
        size = int(self._stream.readinto(buffer))
        self._size += size
        if self._size > self._limit:
            raise UserError(
                f"{self._path}: expands to more than {self._limit:,} bytes, over {MAX_RATIO} times its size: no sane data file "
                "does, so that reading stops here. If it is meant, expand it and give the plain file."
            )
        return size

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
