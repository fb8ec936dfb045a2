"""One side of a benchmark in a process of its own, driven by turns through a pipe.

The parent loads no heavy library, so a worker's peak memory is its own. A worker computes only while the parent waits for
it: whatever else was started stands at its pipe meanwhile. Invariants:
- A worker that fails or dies ends the benchmark with its traceback, or its exit code and the end of its output.
- A worker whose parent is gone ends by itself; leaving the `with` block ends it in any case.
"""

import contextlib
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from relax.errors import UserError

LOG_TAIL = 3000  # characters of a dead worker's output to show
PATIENCE_S = 20  # seconds that a worker whose work is done has to leave


class WorkerFailed(RuntimeError):
    """A worker raised, died, or took too long."""


class Turns:
    """The worker's end of the pipe: `wait` for a turn, compute, `reply`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def wait(self) -> None:
        """Sleep until the parent gives the turn; ends the process if the parent is gone."""
        try:
            self._connection.recv()
        except EOFError:
            os._exit(1)

    def reply(self, value: Any) -> None:
        self._connection.send(("value", value))


class Worker:
    """Runs `function(turns, *args)` in a new process; its output goes to the file `log`."""

    def __init__(self, name: str, function: Callable[..., None], *args: Any, log: Path) -> None:
        self.name, self._log = name, log
        self._connection, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, log, function, args), name=name)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        if error is None:
            self._process.join(PATIENCE_S)
        self._process.kill()
        self._process.join()

    def answer(self, *, timeout: float) -> Any:
        """What the worker replies next; UserError or WorkerFailed where it does not. timeout: seconds."""
        try:
            if not self._connection.poll(timeout):
                raise WorkerFailed(f"{self.name}: no answer within {timeout:.0f} s\n{self._tail()}")
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerFailed(f"{self.name}: {self._end()}\n{self._tail()}") from None
        if kind == "user error":
            raise UserError(value)
        if kind == "failure":
            raise WorkerFailed(f"{self.name}:\n{value}")
        return value

    def turn(self, *, timeout: float) -> Any:
        """Give the worker its turn and wait for its reply."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` says why
            self._connection.send(None)
        return self.answer(timeout=timeout)

    def _end(self) -> str:
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            hint = ": was memory short?" if -code == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{hint}"
        return f"ended with exit code {code}"

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return text[-LOG_TAIL:]


def _serve(connection: Connection, log: Path, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    with log.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    try:
        function(Turns(connection), *args)
    except UserError as error:
        connection.send(("user error", str(error)))
    except BaseException:
        connection.send(("failure", traceback.format_exc()))
    finally:
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall clock and CPU time of all threads of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> "Seconds":
        """What has passed since then."""
        now = Seconds.now()
        return Seconds(now.wall - self.wall, now.cpu - self.cpu)

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


def peak_rss_gib() -> float:
    """The most memory that this process has had resident, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
