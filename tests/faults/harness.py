"""Trials: a command meets a fault, the same command runs again, and every byte is that of a run without the fault.

Invariant of a trial: when the second run has ended well, each file that an undisturbed run leaves is there with its bytes
(weights, optimizer, tokens, reference table, export), the metrics log has its lines but for perf/*, and nothing half
written is left.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.child import Fault
from tests.integration.command import Ended, Flags, Running, Server, command_line, write_pairs
from tests.models import save_tiny

NUM_PAIRS = 20
FLAGS: Flags = {
    "loss_type": "dpo",
    "preference_max_length": 128,
    "preference_max_completion_length": 64,
    "num_rollout": 2,
    "global_batch_size": 8,
    "max_tokens_per_gpu": 512,
    "lr": 1e-3,
    "no_bf16": True,
    "device": "cpu",
    "peak_tflops": 1,
    "save": "out/run",
    "load": "out/run",
    "save_interval": 1,
    "keep_checkpoints": 1,
}
WINDOWS = {  # beginnings of paths
    ".cache/relax/reference": "reference table",
    ".cache/relax/.reference": "reference table",
    ".cache": "data cache",
    "log": "log",
    "out/run": "checkpoint",
    "out/": "export",
    "tokens": "prefix",
    "mcore": "checkpoint",
    "hf": "export",
    ".hf": "export",
    "scores": "scores",
    ".scores": "scores",
}
THERE = ("is there already: remove it", " exists: remove it")  # a command that never replaces what it wrote before


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, and the files that lie in its working directory before (`start`; None: nothing)."""

    name: str
    arguments: tuple[str, ...]
    module: str = "relax.train"
    start: Path | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A write: its number in the command, what it does, and to which file."""

    number: int
    call: str
    path: str

    @property
    def window(self) -> str:
        """What it belongs to."""
        return next((WINDOWS[name] for name in WINDOWS if self.path.startswith(name)), "directories")


class Bench:
    """A warm server, a tiny model and pairs, and what the commands leave when nothing disturbs them."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root, self._count = server, root, 0
        self._undisturbed: dict[Command, tuple[list[Site], dict[str, Any]]] = {}
        save_tiny(root / "model", "qwen3")
        write_pairs(root / "train.jsonl", NUM_PAIRS)
        write_pairs(root / "eval.jsonl", 3, seed=1)

    def train(self, name: str, *, start: Path | None = None, **changes: Any) -> Command:
        """`relax.train` with FLAGS and changes."""
        flags = {"hf_checkpoint": self.root / "model", "prompt_data": self.root / "train.jsonl"} | FLAGS | changes
        return Command(name, tuple(command_line(flags)), start=start)

    def directory(self, command: Command) -> Path:
        """A new working directory for it."""
        self._count += 1
        directory = self.root / f"{command.name}-{self._count}".replace(" ", "-")
        if command.start is None:
            directory.mkdir()
        else:
            shutil.copytree(command.start, directory)
        return directory

    def start(
        self,
        command: Command,
        directory: Path,
        *,
        file_limit: int | None = None,
        environment: dict[str, str] | None = None,
        trace: Path | None = None,
        **fault: Any,
    ) -> Running:
        """Start it under a fault."""
        arguments = [*Fault(trace=str(trace or os.devnull), **fault).arguments(), command.module, *command.arguments]
        return self.server.start(
            arguments, directory=directory, module="tests.faults.child", file_limit=file_limit, environment=environment
        )

    def run(self, command: Command, directory: Path, **options: Any) -> Ended:
        """Run it to its end, whatever that is."""
        return self.start(command, directory, **options).wait()

    def finished(self, command: Command, *, trace: Path | None = None) -> Path:
        """A directory where it has ended well."""
        directory = self.directory(command)
        ended = self.run(command, directory, trace=trace)
        assert ended.code == 0, ended.err[-3000:]
        return directory

    def undisturbed(self, command: Command) -> tuple[list[Site], dict[str, Any]]:
        """Its writes, and what it leaves."""
        if command not in self._undisturbed:
            trace = self.root / f"trace of {command.name}"
            directory = self.finished(command, trace=trace)
            lines = trace.read_text().splitlines()
            sites = [Site(number, *line.split(" ", 1)) for number, line in enumerate(lines, 1)]
            self._undisturbed[command] = sites, outcome(directory)
            shutil.rmtree(directory)
        return self._undisturbed[command]

    def trial(self, command: Command, **options: Any) -> Ended:
        """The command under a fault, then again without, and nothing is lost: AssertionError with the difference else."""
        directory = self.directory(command)
        ended = self.run(command, directory, **options)
        self.resumes(command, directory)
        shutil.rmtree(directory)
        return ended

    def resumes(self, command: Command, directory: Path) -> None:
        """The command, run in a directory that a fault left, ends as if there had been none."""
        _, expected = self.undisturbed(command)
        ended = self.run(command, directory)
        assert ended.code == 0 or any(words in ended.error for words in THERE), ended.err[-3000:]
        compare(expected, directory)


def compare(expected: dict[str, Any], directory: Path) -> None:
    """A directory holds what it must, bit for bit, and nothing half written."""
    found = outcome(directory)
    wrong = [name for name in expected if expected[name] != found.get(name)]
    assert not wrong, {name: (expected[name], found.get(name)) if name.endswith("l") else None for name in wrong}
    left = sorted(name for name in found.keys() - expected.keys() if not extra(name))
    assert not left, left


def outcome(directory: Path) -> dict[str, Any]:
    """What a run leaves, by file: bytes, or a log's lines without what no two runs share."""
    found: dict[str, Any] = {}
    for file in sorted(directory.rglob("*")):
        name = str(file.relative_to(directory))
        if file.is_dir():
            continue
        if file.parent.name == "log" and file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]
        elif file.name == "common.pt":  # its pickle says, too, which equal values were one object
            found[name] = plain(torch.load(file, weights_only=True))
        elif file.name == "checksums.json":  # of those two, too
            found[name] = json.loads(file.read_text())["tensors"]
        elif file.name == ".metadata":  # names each save by a number of its own
            found[name] = file.stat().st_size
        else:
            found[name] = file.read_bytes()
    return found


def plain(value: Any) -> Any:
    """Nested values whose tensors are bytes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def extra(name: str) -> bool:
    """Whether a file that only the disturbed run leaves may be there: a checkpoint that was not yet deleted, an older log."""
    return name == "log/run.jsonl.old" or "/iter_" in name


@contextmanager
def bench() -> Iterator[Bench]:
    """A bench of its own, for the command."""
    with tempfile.TemporaryDirectory(prefix="relax-faults-") as name:
        root = Path(name)
        root.chmod(0o755)
        with Server(root / "jobs") as server:
            yield Bench(server, root)
