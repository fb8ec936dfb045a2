"""`python -m tests.faults.child FAULT MODULE ARGUMENTS`: a command that meets a fault at a chosen one of its writes.

A write is an operation that changes files below the working directory: a file opened for writing, made longer or synced, a
name made, moved or removed. An audit hook sees them all, in every thread, and numbers them from 1; each is a line in the
fault's trace before it happens, so that the trace's last line is where a killed command was. Nothing else of the command is
changed.
"""

import ctypes
import dataclasses
import json
import os
import pwd
import resource
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CALLS = {"open": "open", "os.rename": "rename", "os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.remove": "remove"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a command.

    kind: "none"; "kill": SIGKILL before write `at`; "cut": killed by the first write beyond `at` bytes of a file; "error":
    write `at` fails with `errno`, and so do all that follow with `lasting`; "term": SIGTERM before write `at` and, with
    `lasting`, before each that follows. clock: the time of day goes back by an hour at each look. nobody: its
    user has no name, no HOME and no rights beyond a file's permissions. trace: where its writes are listed.
    """

    trace: str
    kind: Literal["none", "kill", "cut", "error", "term"] = "none"
    at: int = 0
    errno: int = 0
    lasting: bool = False
    clock: bool = False
    nobody: bool = False

    def arguments(self) -> list[str]:
        return [json.dumps(dataclasses.asdict(self))]


class Writes:
    """Numbers and lists writes, and lets the fault happen."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._count, self._root = fault, 0, os.getcwd() + "/"
        self._trace = os.open(fault.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def listen(self) -> None:
        """From now on, to the end of the process."""
        import numpy as np

        def of_descriptor(function: Any, name: str) -> Any:
            def before(descriptor: Any, *arguments: Any) -> Any:
                number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
                self._note(name, os.readlink(f"/proc/self/fd/{number}"))
                return function(descriptor, *arguments)

            return before

        os.fsync, os.posix_fallocate = of_descriptor(os.fsync, "fsync"), of_descriptor(os.posix_fallocate, "allocate")
        flush = np.memmap.flush

        def flushing(array: Any) -> None:
            self._note("flush", mapped_file(array.ctypes.data))
            flush(array)

        np.memmap.flush = flushing  # type: ignore[method-assign]  # the child's own library
        sys.addaudithook(self._heed)

    def _heed(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CALLS or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        path, directory = arguments[0], arguments[-1] if event != "open" else -1
        if isinstance(path, int):
            return
        if event in ("os.remove", "os.rmdir", "os.mkdir") and directory not in (-1, None):
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), os.fsdecode(path))
        self._note(CALLS[event], os.fsdecode(path))

    def _note(self, call: str, path: str) -> None:
        path = os.path.abspath(path)
        if not path.startswith(self._root):
            return
        self._count += 1
        os.write(self._trace, f"{call} {path.removeprefix(self._root)}\n".encode())
        fault = self._fault
        if not (self._count == fault.at or (fault.lasting and self._count > fault.at)):
            return
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "error":
            raise OSError(fault.errno, os.strerror(fault.errno), path)


def mapped_file(address: int) -> str:
    """The file that is mapped to an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return line.split(maxsplit=5)[5]
    raise ValueError(f"nothing is mapped to {address:x}")


def become_nobody() -> None:
    """Lose what root has beyond others, as another user would whom the interpreter's files need not suffer."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this process; no capability
    assert libc.capset(header, none) == 0, os.strerror(ctypes.get_errno())
    os.environ.pop("HOME", None)

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    pwd.getpwuid = unknown


def main() -> None:
    """Prepare the fault, then be the command."""
    fault = Fault(**json.loads(sys.argv[1]))
    if fault.kind == "cut":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, resource.RLIM_INFINITY))
    if fault.clock:
        now, looks = time.time(), iter(range(1, 1 << 62))
        time.time = lambda: now - 3600.0 * next(looks)
    if fault.nobody:
        become_nobody()
    Writes(fault).listen()
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
