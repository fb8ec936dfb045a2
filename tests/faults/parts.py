"""The harness's parts: each lets one kind of fault happen in every place that it can, or (`few`) in a few of them.

A part gives trials: where the fault strikes, and what to call. The call says how the command ended, and raises AssertionError
where something was lost, or told otherwise than in one message.
"""

import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.harness import Bench, Command, Site, compare, outcome
from tests.integration.command import Ended, Running, read_log, timeless

Trials = Iterator[tuple[str, Callable[[], str]]]  # (where, the trial, which says how the command ended)
REFUSALS = ((errno.ENOSPC, False), (errno.EROFS, True), (errno.EACCES, False))  # and whether it lasts
LAYOUTS = {"TP": {"tensor_model_parallel_size": 2}, "PP": {"pipeline_model_parallel_size": 2}, "DP": {}}
LOSSES = ((1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP))  # of a rank
DISKS = (40, 300, 700, 1200, 1700, 2200)  # KiB


def commands(bench: Bench) -> list[Command]:
    """Every command that writes, with what it needs around it."""
    trained, warm = bench.root / "trained", bench.root / "warm"
    if not warm.exists():
        bench.finished(bench.train("first", keep_checkpoints=2)).rename(trained)
        shutil.copytree(trained / ".cache", warm / ".cache")
    model, pairs = ("--hf-checkpoint", str(bench.root / "model")), str(bench.root / "train.jsonl")
    tokens = ("--handler-name", "PreferencePairHandler", "--tokenizer-name-or-path", str(bench.root / "model"))
    to_hf = ("mcore-to-hf", *model, "--load", "out/run", "--save", "hf")
    score = (*model, "--prompt-data", pairs, "--preference-max-length", "128", "--preference-max-completion-length", "64")
    return [
        bench.train("train", save_hf="out/hf"),
        bench.train("background", start=warm, async_save=True),
        bench.train("again", start=trained, ckpt_step=1, keep_checkpoints=2),
        Command("preprocess", ("--input", pairs, "--output-prefix", "tokens/pairs", *tokens), module="relax.preprocess"),
        Command("to Megatron", ("hf-to-mcore", *model, "--save", "mcore"), module="relax.convert"),
        Command("to Hugging Face", to_hf, module="relax.convert", start=trained),
        Command(
            "score", (*score, "--output", "scores.jsonl", "--no-bf16", "--device", "cpu"), module="relax.score", start=warm
        ),
    ]


def places(bench: Bench, few: bool) -> Iterator[tuple[Command, Site, str]]:
    """Every write of every command, and its window; few: the middle one of each window, of checkpoints in each command."""
    seen: set[str] = set()
    for command in commands(bench):
        writes, _ = bench.undisturbed(command)
        for window in dict.fromkeys(site.window for site in writes):
            where = f"{command.name}: {window}"
            inside = [site for site in writes if site.window == window]
            if few:
                inside = [] if window in seen else inside[len(inside) // 2 :][:1]
                seen |= {window} - {"checkpoint"}
            for site in inside:
                yield command, site, where


def sizes(bench: Bench, few: bool) -> Iterator[tuple[Command, int]]:
    """Every command with every size, in bytes, at which one of its files is not yet whole; few: one size."""
    for command in commands(bench):
        _, left = bench.undisturbed(command)
        found = sorted({len(content) - 1 for content in left.values() if isinstance(content, bytes) and len(content) > 1})
        for size in found[-1:] if few else found:
            yield command, size


def kills(bench: Bench, few: bool) -> Trials:
    """kill -9 before a write."""

    def trial(command: Command, site: Site) -> str:
        ended = bench.trial(command, kind="kill", at=site.number)
        return "killed" if ended.code == -signal.SIGKILL else done(ended)

    for command, site, where in places(bench, few):
        yield where, partial(trial, command, site)


def cuts(bench: Bench, few: bool) -> Trials:
    """Killed within a write, by a limit on a file's size: the first file that grows beyond it is torn there."""

    def trial(command: Command, size: int) -> str:
        ended = bench.trial(command, kind="cut", at=size)
        return "killed" if ended.code == -signal.SIGXFSZ else done(ended)

    for command, size in sizes(bench, few):
        yield f"{command.name}: inside a file", partial(trial, command, size)


def refusals(bench: Bench, few: bool) -> Trials:
    """A write that the file system refuses, once (no space, permission) or from there on (read-only)."""

    def trial(command: Command, site: Site, code: int, lasting: bool) -> str:
        ended = bench.trial(command, kind="error", at=site.number, errno=code, lasting=lasting)
        return told(ended)

    for command, site, where in places(bench, few):
        code, lasting = REFUSALS[site.number % 3]
        yield f"{where}, {errno.errorcode[code]}", partial(trial, command, site, code, lasting)


def full(bench: Bench, few: bool) -> Trials:
    """A disk without room: files that cannot grow beyond a limit, and (where mounting is allowed) a small tmpfs."""

    def limit(command: Command, size: int) -> str:
        ended = bench.trial(command, file_limit=size)
        return told(ended)

    def tmpfs(command: Command, kilobytes: int) -> str:
        directory = bench.directory(command)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(directory)]
        if subprocess.run(mount, capture_output=True).returncode:
            return "not allowed to mount"
        try:
            ended = bench.run(command, directory)
            subprocess.run(["mount", "-o", "remount,size=64m", directory], check=True)
            bench.resumes(command, directory)
        finally:
            subprocess.run(["umount", directory], check=True)
        return told(ended)

    for command, size in sizes(bench, few):
        if size < 4096:  # nor could messages be written
            continue
        yield f"{command.name}: a limit on files", partial(limit, command, size)
    for kilobytes in DISKS[1:2] if few else DISKS:
        yield "train: a small disk", partial(tmpfs, commands(bench)[0], kilobytes)


def done(ended: Ended) -> str:
    """The fault found no place: a background save may make fewer writes."""
    assert ended.code == 0, (ended.code, ended.err[-3000:])
    return "done"


def told(ended: Ended) -> str:
    """A fault is one message and exit code 2, unless the command could do without that write."""
    if ended.code == 0:
        return "done"
    assert ended.code == 2 and ended.err.startswith("relax: error: ") and "Traceback" not in ended.err, (
        ended.code,
        ended.err[-3000:],
    )
    return "told"


def signals(bench: Bench, few: bool) -> Trials:
    """SIGTERM before a write, or before each from there on: the run saves and stops, or dies; nothing is lost."""

    def trial(command: Command, site: Site, lasting: bool) -> str:
        ended = bench.trial(command, kind="term", at=site.number, lasting=lasting)
        assert ended.code in (0, 128 + signal.SIGTERM, -signal.SIGTERM) and "Traceback" not in ended.err, ended
        return {0: "done", -signal.SIGTERM: "died"}.get(ended.code, "stopped")

    for command, site, where in places(bench, few):
        lasting = site.number % 2 == 1
        yield f"{where}, {'each' if lasting else 'one'}", partial(trial, command, site, lasting)


def together(bench: Bench, few: bool) -> Trials:
    """Two runs at once on one --save: one is refused; on one cache: both end well."""

    def save() -> str:
        command = bench.train("together", num_rollout=40, save_interval=20)
        directory = bench.directory(command)
        ends = [running.wait() for running in [bench.start(command, directory) for _ in range(2)]]
        assert sorted(ended.code for ended in ends) == [0, 2], ends
        refused = next(ended.error for ended in ends if ended.code == 2)
        assert refused.startswith("--save out/run is in use by another run"), refused
        bench.resumes(command, directory)
        return "one refused"

    def cache() -> str:
        pair = [bench.train("cache", save=f"out/{name}", load=f"out/{name}") for name in ("one", "two")]
        directory = bench.directory(pair[0])
        ends = [running.wait() for running in [bench.start(run, directory) for run in pair]]
        assert [ended.code for ended in ends] == [0, 0], ends
        one, two = (timeless(read_log(directory / f"log/{name}.jsonl")) for name in ("one", "two"))
        assert one == two and len(one) == 2
        tensors = [(directory / f"out/{name}/iter_0000002/__0_0.distcp").read_bytes() for name in ("one", "two")]
        assert tensors[0] == tensors[1]
        return "both done"

    for _ in range(1 if few else 5):
        yield "one --save", save
        yield "one cache", cache


def ranks(bench: Bench, few: bool) -> Trials:
    """Two ranks of which one dies or hangs: the other ends, and the same command goes on."""

    def start(command: Command, directory: Path) -> list[Running]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places = [{"RANK": rank, "LOCAL_RANK": rank, **world} for rank in ("0", "1")]
        return [bench.start(command, directory, environment=place) for place in places]

    def finish(command: Command, directory: Path) -> None:
        ends = [rank.wait() for rank in start(command, directory)]
        assert [ended.code for ended in ends] == [0, 0], ends

    def trial(command: Command, whole: Path, victim: int, number: signal.Signals) -> str:
        if not whole.exists():
            whole.mkdir()
            finish(command, whole)
        directory = bench.directory(command)
        pair = start(command, directory)
        log = directory / "log/run.jsonl"
        wait(lambda: log.exists() and log.read_bytes().count(b"\n") >= 2)
        pair[victim].kill(number)
        other = pair[1 - victim].wait()
        pair[victim].kill(signal.SIGKILL)
        pair[victim].wait()
        assert other.code == 3 and "Traceback" not in other.err and "another rank" in other.err, other
        finish(command, directory)
        compare(outcome(whole), directory)
        return "the other ended"

    for layout, flags in list(LAYOUTS.items())[: 1 if few else None]:
        command = bench.train(f"ranks {layout}", save_hf="out/hf", distributed_timeout_minutes=1, num_rollout=20, **flags)
        for victim, number in LOSSES[: 1 if few else None]:
            where = f"{layout}: rank {victim} {'dies' if number == signal.SIGKILL else 'hangs'}"
            yield where, partial(trial, command, bench.root / f"whole-{layout}", victim, number)


def wait(ready: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Until it is so."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


def clock(bench: Bench, few: bool) -> Trials:
    """The time of day goes back by an hour at every look, and a run goes on from files of tomorrow."""
    command = bench.train("clock", save_hf="out/hf")

    def back() -> str:
        return done(bench.trial(command, clock=True))

    def ahead(at: int) -> str:
        directory = bench.directory(command)
        ended = bench.run(command, directory, kind="kill", at=at)
        assert ended.code == -signal.SIGKILL
        tomorrow = time.time() + 86_400
        for path in directory.rglob("*"):
            os.utime(path, (tomorrow, tomorrow))
        bench.resumes(command, directory)
        return "resumed"

    yield "an hour back at each look", back
    for at in (80,) if few else (15, 40, 80):
        yield "files of tomorrow", partial(ahead, at)


def steps(bench: Bench, few: bool) -> Trials:
    """Very many tiny steps: memory, descriptors and the time of a step stay as they were."""
    count = 300 if few else 10_000
    flags = {"num_rollout": count, "global_batch_size": 1, "log_interval": count, "save_interval": count // 4, "lr": 1e-5}

    def trial() -> str:
        command = bench.train("steps", **flags)
        directory = bench.directory(command)
        running = bench.start(command, directory)
        log, seen = directory / "log/run.jsonl", []
        for step in (count // 2, count - 50):
            wait(lambda step=step: log.exists() and log.read_bytes().count(b"\n") >= step, seconds=580)
            os.kill(running.pid, signal.SIGSTOP)
            pages = int(Path(f"/proc/{running.pid}/statm").read_text().split()[1])
            seen.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{running.pid}/fd"))))
            os.kill(running.pid, signal.SIGCONT)
        assert running.wait().code == 0
        (memory, descriptors), (later, last) = seen
        times = [1e3 / line["perf/pairs_per_s"] for line in read_log(log)]
        first, second = (median(times[at : at + count // 4]) for at in (count // 4, count - count // 4))
        assert later - memory < 4 and last == descriptors and second < 1.5 * first, (seen, first, second)
        return f"{memory:.1f}, {later:.1f} MiB; {descriptors}, {last} descriptors; {first:.2f}, {second:.2f} ms a step"

    yield f"{count:,} steps", trial


def user(bench: Bench, few: bool) -> Trials:
    """A user without name, HOME and rights trains where the directory is theirs, and is told where it is not."""

    def own() -> str:
        """Twice, since elementwise work may be done by other kernels where there is no home to keep compiled ones in."""
        command = bench.train("user", save_hf="out/hf")
        directories = [bench.directory(command) for _ in range(2)]
        for directory in directories:
            ended = bench.run(command, directory, nobody=True)
            assert ended.code == 0, ended.err[-3000:]
        compare(outcome(directories[0]), directories[1])
        return "done"

    def closed(flag: str, changes: dict[str, Any]) -> str:
        command = bench.train("closed", **changes)
        directory = bench.directory(command)
        (directory / "closed").mkdir(mode=0o555)
        ended = bench.run(command, directory, nobody=True)
        assert ended.error.startswith(f"{flag} closed/x is not writable"), ended
        assert [path.name for path in directory.iterdir()] == ["closed"]
        return "told"

    yield "no name, no HOME", own
    for name in ("save", "save_hf", "log_dir", "data_cache_dir"):
        flag = "--" + name.replace("_", "-")
        yield f"no right to write, {flag}", partial(closed, flag, {"load": None, name: "closed/x"})


PARTS: dict[str, Callable[[Bench, bool], Trials]] = {
    part.__name__: part for part in (kills, cuts, refusals, full, signals, together, ranks, clock, steps, user)
}
