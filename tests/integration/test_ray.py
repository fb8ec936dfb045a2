"""A run script on a real Ray, which starts for it on this machine alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.command import ENVIRONMENT, ROOT, Workplace, timeless, write_pairs

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

SCRIPT = ROOT / "scripts/training/dpo/run-qwen3-0.6B-ultrafeedback-1xgpu.sh"


def start(place: Workplace) -> subprocess.Popen[str]:
    """Two CPU workers on a Ray of their own."""
    variables = {
        "HF_CHECKPOINT": str(place.flags["hf_checkpoint"]),
        "PROMPT_DATA": "pairs.jsonl",
        "SAVE_DIR": "out",
        "EXP_NAME": "run",
        "NUM_ROLLOUT": "100",
        "GLOBAL_BATCH_SIZE": "8",
        "MAX_TOKENS_PER_GPU": "256",
        "LR": "1e-3",
        "NNODES": "2",
        "NUM_GPUS": "0",
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HOME": str(place.directory),  # Ray leaves a token there
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    lengths = ["--preference-max-length", "64", "--preference-max-completion-length", "32"]
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts/entrypoint/ray-job.sh"), str(SCRIPT), "--no-bf16", *lengths],
        cwd=place.directory,
        env={**os.environ, **ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_on_ray_saves_and_stops_on_a_signal_and_has_one_process_numbers(fresh_place: Workplace) -> None:
    """One start, since Ray's own takes half a minute; one process resumes what two workers saved."""
    place = fresh_place
    write_pairs(place.path("pairs.jsonl"), 20)
    log = place.path("log/run.jsonl")
    job = start(place)
    while not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 143, out
    lines = out.splitlines()
    step = int(place.path("out/run/latest_checkpointed_iteration.txt").read_text())
    assert (
        3 <= step < 100 and lines[-1] == f"stopped by signal 15 after step {step}: saved in out/run; the same command resumes"
    )
    assert lines[0].startswith("Logging to") and lines[1].startswith("--load out/run: no checkpoint yet")  # nothing of Ray's
    assert out.count("train: 20 of 20 rows kept") == 1

    flags = {"prompt_data": "pairs.jsonl", "max_tokens_per_gpu": 256, "num_rollout": 100}
    flags |= {"preference_max_length": 64, "preference_max_completion_length": 32}
    place.succeed(exp_name="one", **flags)
    one, two = timeless(place.log("one")), timeless(place.log("run"))
    assert len(two) == step
    for expected, found in zip(one[:3], two[:3], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert f"on cpu, step {step}\n" in place.succeed(exp_name="on", load="out/run", **{**flags, "num_rollout": step + 1})
    assert [line["train/step"] for line in place.log("on")] == [step + 1]
