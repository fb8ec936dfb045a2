"""kill -9 during a save, at each of its file operations and at random moments, loses nothing that was saved before.

The test runs this file as a script, which forks a process per trial: it dies just before its k-th write, for every k, or is
killed by its parent at a random moment. Another one then looks at what is left.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults.child import Fault, Writes

pytestmark = pytest.mark.distributed
TRACKER = "latest_checkpointed_iteration.txt"


def test_a_kill_loses_no_saved_checkpoint(tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads(done.stdout)
    # One mkdir; five files (`.metadata` renamed); directory and tracker renamed; the old one renamed, removed.
    assert kills["new"] >= 18 and kills["replace"] >= 18 and kills["random"] == 6


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a process of its own with a process group of one; the status it ended with."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            join_group()
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def join_group() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def state(step: int, *, numbers: int = 64) -> dict:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((numbers,), float(step))), "step": step}


def save(directory: Path, step: int, *, keep: int | None = None, background: bool = False, numbers: int = 64) -> None:
    store = CheckpointStore(directory, keep=keep)
    store.save_checkpoint(
        step=step,
        state=state(step, numbers=numbers),
        files={"relax_run.json": {"step": step}},
        async_save=background,
    )
    store.finish_pending(blocking=True)


def check(directory: Path, expected: set[int], whole: set[int], numbers: int = 64) -> None:
    """The checkpoint found is one of `expected`; it and all of `whole` hold their values; the next save tidies up."""
    latest = find_checkpoint(directory, step=None, flag="--load", say=lambda text: None)
    assert latest is not None and latest.step in expected, (latest, expected)
    for step in whole | {latest.step}:
        info = find_checkpoint(directory, step=step, flag="--load")
        got = load_checkpoint(info, state(0, numbers=numbers))
        assert got["step"] == step and got["w"].tolist() == [step] * numbers and info.run == {"step": step}
    save(directory, 1000, numbers=numbers)
    assert not [name for name in os.listdir(directory) if name.startswith(".")]
    assert (directory / TRACKER).read_text() == "1000"


def save_until(operation: int, directory: Path, step: int, keep: int | None) -> None:
    """Save, but die just before the `operation`-th write (counted from 1)."""
    os.chdir(directory)
    Writes(Fault(trace=os.devnull, kind="kill", at=operation)).listen()
    save(directory, step, keep=keep)


def every_operation(root: Path, *, target: int, keep: int | None) -> int:
    """Steps 1 and 2 are there; `target` is added, or replaces one. Returns the kills."""
    before, directory, kills = root / "before", root / "run", 0
    for step in (1, 2):
        assert status(forked(partial(save, before, step))) == 0
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(before, directory)
        ended = status(forked(partial(save_until, kills + 1, directory, target, keep)))
        if ended == 0:
            return kills
        assert ended == -signal.SIGKILL
        kills += 1
        pruned = (directory / "iter_0000003").is_dir() and not (directory / "iter_0000001").is_dir()
        whole = {2} if pruned else {1, 2}
        assert status(forked(partial(check, directory, {2, target}, whole))) == 0, kills


def save_on_and_on(directory: Path, first: int, writer: int, background: bool) -> None:
    for step in range(first, first + 500):
        save(directory, step, keep=2, numbers=200_000, background=background)
        os.write(writer, step.to_bytes(4, "little"))


def random_moments(root: Path, *, trials: int = 6) -> int:
    """A process saves step after step, keeping two; after a kill the last reported one, or the next, is there."""
    directory, copy, generator, step = root / "random", root / "copy", random.Random(0), 0
    for trial in range(trials):
        reader, writer = os.pipe()
        pid = forked(partial(save_on_and_on, directory, step + 1, writer, bool(trial % 2)))
        os.close(writer)
        reported = os.read(reader, 4)
        time.sleep(generator.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        assert status(pid) == -signal.SIGKILL
        while data := os.read(reader, 4):
            reported = data
        os.close(reader)
        step = int.from_bytes(reported, "little")
        shutil.copytree(directory, copy)
        assert status(forked(partial(check, copy, {step, step + 1}, set(), 200_000))) == 0, trial
        shutil.rmtree(copy)
    return trials


if __name__ == "__main__":
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from relax.backend.checkpoint.loading import CheckpointStore, find_checkpoint, load_checkpoint

    os.fsync = lambda descriptor: None  # a killed process leaves the page cache; syncing is another test's
    root = Path(sys.argv[1])
    results = {
        "new": every_operation(root / "new", target=3, keep=2),
        "replace": every_operation(root / "replace", target=2, keep=None),
        "random": random_moments(root),
    }
    print(json.dumps(results))
