"""A C++ file compiled for this machine and kept for later runs where nobody but this user can put anything.

A library is kept as `~/.cache/relax/kernels/KEY.so` (`XDG_CACHE_HOME` moves `~/.cache`) with its checksum behind it, where a
loader does not look, so that one rename makes both visible. Where there can be no such directory, it is built for this process
alone, in a temporary one. Invariants:
- A kept library is loaded only from a directory that this user owns and no other may enter, and only if it is a file of this
  user's, whole, and has every symbol; any other is built again.
- A library is used with the source, the compiler, the CPU and the C library that it was built for.
- Whoever else builds the same, what is there is whole or absent, also after a power failure.
"""

import ctypes
import hashlib
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CHECKSUM = hashlib.sha256().digest_size
# What tells CPUs with other instructions apart, in /proc/cpuinfo of x86 and of ARM.
_CPU_LINES = (b"model name", b"flags", b"Features", b"CPU implementer", b"CPU architecture", b"CPU variant", b"CPU part")


class BuildFailed(Exception):
    """There is no library, and this is why."""


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library. key: of what it was built from; unkept: why it is built again in the next run, None where it is not."""

    loaded: ctypes.CDLL
    key: str
    unkept: str | None


def load_library(source: Path, *, flags: Sequence[str], symbols: Sequence[str]) -> Library:
    """The library of `source`, which has `symbols`, kept or new. Raises BuildFailed."""
    compiler = os.environ.get("CXX", "c++")
    version = _run([compiler, "--version"], timeout=60)
    built_for = [source.read_bytes(), compiler.encode(), version, " ".join(flags).encode(), _machine()]
    key = hashlib.sha256(b"\0".join(built_for)).hexdigest()[:16]
    command = [compiler, *flags, str(source)]
    try:
        path = _own_directory() / f"{key}.so"
        return Library(_kept(path, symbols) or _built(command, path, symbols), key, None)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        unkept = str(error)
    try:
        with tempfile.TemporaryDirectory() as directory:  # a loaded library needs its file no more
            return Library(_built(command, Path(directory) / f"{key}.so", symbols), key, unkept)
    except OSError as error:
        raise BuildFailed(f"{compiler} (CXX): {error}") from None


def _own_directory() -> Path:
    """The cache. Raises OSError where it is not this user's alone, or cannot be made."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax" / "kernels"
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(f"{directory} is not a directory of this user's with mode 700")
    return directory


def _kept(path: Path, symbols: Sequence[str]) -> ctypes.CDLL | None:
    """The library if it is whole and loads, None otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return None
            content = stream.read()
        whole = hashlib.sha256(content[:-CHECKSUM]).digest() == content[-CHECKSUM:]
        return _loaded(path, symbols) if whole else None
    except OSError:
        return None


def _built(command: Sequence[str], path: Path, symbols: Sequence[str]) -> ctypes.CDLL:
    """Compile to `path`, which appears whole and only if it loads. Raises OSError, BuildFailed."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        aside = Path(directory) / path.name
        _run([*command, "-o", str(aside)], timeout=600)
        with aside.open("r+b") as stream:
            stream.write(hashlib.sha256(stream.read()).digest())
            stream.flush()
            os.fsync(stream.fileno())
        library = _loaded(aside, symbols)
        aside.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return library


def _loaded(path: Path, symbols: Sequence[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    missing = [name for name in symbols if not hasattr(library, name)]
    if missing:
        raise OSError(f"{path}: no {missing[0]} in the compiled library")
    return library


def _run(command: list[str], *, timeout: int) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=timeout).stdout
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise BuildFailed(f"{command[0]} (CXX): {reason}")


def _machine() -> bytes:
    """What tells machines apart that cannot run each other's libraries."""
    try:
        lines = CPUINFO.read_bytes().splitlines()
        cpu = sorted({line for line in lines if line.startswith(_CPU_LINES)})
    except OSError:
        cpu = [platform.processor().encode(), platform.node().encode()]
    return b"\n".join([*cpu, platform.machine().encode(), "-".join(platform.libc_ver()).encode()])
