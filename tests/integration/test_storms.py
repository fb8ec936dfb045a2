"""The real command under signals that come many times over, as from a scheduler, a process group and a launcher at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.command import Workplace, environment, timeless

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

ONE = ["-m"]
TWO = ["-m", "relax.launch", "--standalone", "--nproc-per-node", "2", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]


def start(place: Workplace, launcher: list[str], **flags: object) -> subprocess.Popen[str]:
    """A run in a process group of its own."""
    module = ["relax.train"] if launcher == ONE else ["-m", "relax.train"]
    return subprocess.Popen(
        [sys.executable, *launcher, *module, *place.arguments(**flags)],
        cwd=place.directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Its child processes, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def storm(job: subprocess.Popen[str], number: signal.Signals) -> int:
    """A signal every 20 ms to its group, and to the ranks that a launcher started, until it has ended; how many rounds."""
    ranks, rounds = children(job.pid), 0
    while job.poll() is None:
        for send, target in [(os.killpg, job.pid), *((os.kill, rank) for rank in ranks)]:
            with contextlib.suppress(ProcessLookupError):
                send(target, number)
        rounds += 1
        time.sleep(0.02)
    return rounds


@pytest.mark.parametrize(("launcher", "number"), [(ONE, signal.SIGTERM), (TWO, signal.SIGTERM), (TWO, signal.SIGINT)])
def test_a_storm_of_signals_is_one_signal(fresh_place: Workplace, launcher: list[str], number: signal.Signals) -> None:
    place = fresh_place
    flags = {"exp_name": "run", "save": "out/run", "load": "out/run", "save_hf": "out/hf", "num_rollout": 400}
    log, tracker = place.path("log/run.jsonl"), place.path("out/run/latest_checkpointed_iteration.txt")
    job = start(place, launcher, **flags)
    while not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        assert job.poll() is None, job.communicate()
        time.sleep(0.01)
    rounds = storm(job, number)
    out, err = job.communicate()
    assert rounds >= 20 and job.returncode == 128 + number, (rounds, err)
    step = int(tracker.read_text())
    assert out.splitlines()[-1] == f"stopped by signal {number} after step {step}: saved in out/run; the same command resumes"
    told = f"relax: stopping by signal {number}, after this step and its checkpoint; SIGQUIT ends it at once\n"
    assert err in ("", told)  # a rank whose step outlasts the storm hears one signal
    assert 3 <= step < 400 and place.path("out/hf/model.safetensors").is_file()
    assert {path.name for path in place.path("out").iterdir()} == {"run", "hf"}  # nothing half-written

    assert f"on cpu, step {step}\n" in place.succeed(**flags | {"num_rollout": step + 2})
    assert [line["train/step"] for line in timeless(place.log("run"))][-1] == step + 2
