"""`python -m relax.train` for tests: runs of it, and data, models and logs to go with them.

`Server` starts runs in processes forked from a warm one (see `command_server`); `fresh` starts the command as a shell
would, imports and all.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
TIMEOUT = 300.0  # seconds; a machine that other work shares is slow

Flags = dict[str, Any]


def environment() -> dict[str, str]:
    """This process's and ENVIRONMENT, without what W&B leaves there for its own child processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | ENVIRONMENT


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a run: its exit code (minus n: killed by signal n), output, and CPU seconds."""

    code: int
    out: str
    err: str
    cpu: float

    @property
    def error(self) -> str:
        """The message of a user's error: exit code 2, one message, nothing else on standard error."""
        assert self.code == 2, (self.code, self.err)
        assert self.err.count("relax: error: ") == 1 and self.err.startswith("relax: error: "), self.err
        assert "Traceback" not in self.err + self.out, self.err
        return self.err.removeprefix("relax: error: ").strip()


class Running:
    """A run that was started; `job` holds its output files."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.pid = int(self._wait_for("pid"))

    def kill(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if not (self.job / "ended").exists():
            os.kill(self.pid, number)

    def output(self) -> str:
        """Standard output so far."""
        return (self.job / "out").read_text() if (self.job / "out").exists() else ""

    def wait(self) -> Ended:
        """Until it ends."""
        report = json.loads(self._wait_for("ended"))
        return Ended(
            code=report["code"],
            out=self.output(),
            err=(self.job / "err").read_text(),
            cpu=report["cpu"],
        )

    def _wait_for(self, name: str) -> str:
        deadline = time.monotonic() + TIMEOUT
        while not ((self.job / name).exists() and (text := (self.job / name).read_text())):
            if time.monotonic() > deadline:
                if name == "ended":
                    os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"{self.job}: no {name!r} after {TIMEOUT:.0f} s:\n{self.output()}")
            time.sleep(0.005)
        return text


class Server:
    """Starts commands in `directory`, so that their default outputs (log/, .cache/) are apart from everything else."""

    def __init__(self, jobs: Path) -> None:
        self._jobs, self._count = jobs, 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("command_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            text=True,
        )

    def __enter__(self) -> Self:
        self._expect("ready")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._process.communicate(timeout=60)

    def start(
        self,
        arguments: Sequence[str],
        *,
        directory: Path,
        module: str = "relax.train",
        environment: dict[str, str] | None = None,
        file_limit: int | None = None,
        draws: bool = False,
    ) -> Running:
        """Start `python -m module arguments`; file_limit: bytes at which writing a file fails; draws: with curves."""
        self._count += 1
        job = self._jobs / str(self._count)
        job.mkdir(parents=True)
        request = {
            "job": str(job),
            "module": module,
            "arguments": list(arguments),
            "directory": str(directory),
            "environment": environment or {},
            "file_limit": file_limit,
            "draws": draws,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._expect("started")
        return Running(job)

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer == word, f"the server said {answer!r} instead of {word!r}"


def fresh(arguments: Sequence[str], *, directory: Path, launcher: Sequence[str] = (), module: str = "relax.train") -> Ended:
    """The command in a new interpreter, under `launcher` (torchrun and its flags) where given."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), module, *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr, cpu=cpu)


@dataclass(frozen=True, slots=True)
class Workplace:
    """A directory where runs go, with the server and the flags that they share."""

    server: Server
    directory: Path
    flags: Flags

    def arguments(self, **changes: Any) -> list[str]:
        """The command line of the shared flags with `changes`; None drops a flag, True is a switch."""
        return list(command_line({**self.flags, **changes}))

    def start(
        self,
        *,
        module: str = "relax.train",
        environment: dict[str, str] | None = None,
        file_limit: int | None = None,
        draws: bool = False,
        **changes: Any,
    ) -> Running:
        """Start a run of the shared flags with `changes`; see `Server.start`."""
        return self.server.start(
            self.arguments(**changes),
            directory=self.directory,
            module=module,
            environment=environment,
            file_limit=file_limit,
            draws=draws,
        )

    def run(self, **options: Any) -> Ended:
        """A run to its end, whatever that is."""
        return self.start(**options).wait()

    def succeed(self, **options: Any) -> str:
        """A run that must end well; its standard output."""
        ended = self.run(**options)
        assert ended.code == 0, ended.err[-3000:]
        return ended.out

    def refuse(self, **options: Any) -> str:
        """A run that must end with a user's error; the message."""
        return self.run(**options).error

    def log(self, name: str) -> list[dict[str, Any]]:
        """The metrics log of the run `name`."""
        return read_log(self.directory / "log" / f"{name}.jsonl")

    def path(self, name: str) -> Path:
        return self.directory / name


def command_line(flags: Flags) -> Iterator[str]:
    """{"global_batch_size": 8} -> --global-batch-size 8; a list is several values, True none, None no flag."""
    for name, value in flags.items():
        if value is None or value is False:
            continue
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield from map(str, value if isinstance(value, list | tuple) else [value])


def read_log(path: Path) -> list[dict[str, Any]]:
    """Every line of a metrics log, parsed."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def timeless(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without perf/*, which no two runs share."""
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in log]


WORDS = ["a", "small", "ship", "sails", "home", "over", "green", "seas", "while", "birds", "sing", "of", "rain", "and", "stone"]


def write_pairs(path: Path, count: int, *, seed: int = 0) -> Path:
    """`count` pairs in the primary format: the chosen answer repeats a word of the question, the rejected one does not."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for number in range(count):
            words = [str(word) for word in rng.choice(WORDS, size=int(rng.integers(3, 7)))]
            history = [{"role": "user", "content": f"{number}: {' '.join(words)}?"}]
            row = {
                side: [*history, {"role": "assistant", "content": text}]
                for side, text in (("chosen", f"{words[0]} {words[-1]}"), ("rejected", f"no {number}"))
            }
            file.write(json.dumps(row) + "\n")
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}
