"""Two nodes on one machine: a run script under the Slurm entry point, whose `srun` is a stand-in that starts two torchruns.

They meet at one rendezvous. When a rank is killed both end; the same command resumes, and gives one process's numbers.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.command import ROOT, Workplace, timeless, write_pairs

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

STEPS = 60  # enough to be hit on the way by a test that has to wait for the processor
SCRIPT = ROOT / "scripts/training/dpo/run-qwen3-0.6B-ultrafeedback-1xgpu.sh"
# Stand-ins for Slurm's commands. srun starts the task on each node, with the node's number, and ends the rest with the first
# that fails, as --kill-on-bad-exit asks; its own flags are recorded.
SCONTROL = '[[ "$*" == "show hostnames node[1-2]" ]] && printf "%s\\n" 127.0.0.1 node2'
SRUN = r"""
while [[ $1 != bash ]]; do echo "$1" >>srun-flags; shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" >node$node.out 2>&1 & tasks+=($!); done
code=0
wait -n || code=$?
((code == 0)) || { sleep 5; kill "${tasks[@]}" 2>/dev/null; }
wait
exit $code
"""


def start(place: Workplace, *flags: str) -> subprocess.Popen[bytes]:
    """The job of two nodes with a CPU process each."""
    commands = place.path("bin")
    commands.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text("#!/usr/bin/env bash\n" + text)
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "1"}
    script = {
        "SAVE_DIR": "out",
        "EXP_NAME": "run",
        "NUM_ROLLOUT": str(STEPS),
        "GLOBAL_BATCH_SIZE": "8",
        "MAX_TOKENS_PER_GPU": "256",
    }
    inputs = {
        "HF_CHECKPOINT": str(place.flags["hf_checkpoint"]),
        "PROMPT_DATA": "pairs.jsonl",
        "LR": "1e-3",
        "NUM_ROLLOUT": str(STEPS),
        "SAVE_INTERVAL": "2",
    }
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts/entrypoint/slurm.sh"), str(SCRIPT), *flags],
        cwd=place.directory,
        env={**os.environ, **slurm, **script, **inputs, "PATH": path, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
    )


def rank_one(place: Workplace) -> int:
    """The process id of rank 1's trainer, from /proc: the one whose environment says so and that runs here."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if b"RANK=1" in environment and (process / "cwd").resolve() == place.directory.resolve():
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("no process of rank 1")


def test_a_killed_rank_ends_both_nodes_and_the_same_command_resumes(fresh_place: Workplace) -> None:
    place = fresh_place
    write_pairs(place.path("pairs.jsonl"), 20)
    flags = ["--no-bf16", "--preference-max-length", "64", "--preference-max-completion-length", "32"]
    job = start(place, *flags)
    log, checkpoints = place.path("log/run.jsonl"), place.path("out/run")
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    while not (tracker.exists() and log.read_bytes().count(b"\n") >= 3):
        assert job.poll() is None, place.path("node0.out").read_text()
        time.sleep(0.01)
    os.kill(rank_one(place), signal.SIGKILL)
    job.wait(timeout=240)
    first, second = (place.path(f"node{node}.out").read_text() for node in (0, 1))
    killed = f"relax: rank 1 on {socket.gethostname()} was killed by signal 9 (SIGKILL)"
    assert second.splitlines()[1].startswith(killed) and len(second.splitlines()) == 2  # after the name of the log
    assert first.splitlines()[-1].startswith("relax: rank 0 stopped: another rank ended first (")
    assert "Traceback" not in first + second
    saved = int(tracker.read_text())
    assert saved in range(2, STEPS, 2) and {path.name for path in checkpoints.glob("iter_*")} >= {f"iter_{saved:07d}"}

    assert start(place, *flags).wait(timeout=240) == 0, place.path("node0.out").read_text()
    assert f"dpo: 0.1 M parameters on cpu, step {saved}" in place.path("node0.out").read_text()
    assert tracker.read_text() == str(STEPS) and len(list(place.path("log").glob("run-*-node1.log"))) == 2
    srun = place.path("srun-flags").read_text().split()
    assert srun[:5] == ["--nodes", "2", "--ntasks", "2", "--ntasks-per-node"] and "--kill-on-bad-exit=1" in srun

    lengths = {"preference_max_length": 64, "preference_max_completion_length": 32, "max_tokens_per_gpu": 256}
    place.succeed(exp_name="one", prompt_data="pairs.jsonl", num_rollout=STEPS, **lengths)
    one, two = timeless(place.log("one")), timeless(place.log("run"))
    assert len(one) == len(two) == STEPS
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
