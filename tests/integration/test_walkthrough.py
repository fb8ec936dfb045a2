"""The whole way of a MindSpeed-RL user: preprocess, convert, train on two ranks, stop, resume, convert back, load, score."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integration.command import ENVIRONMENT, ROOT, TIMEOUT, Flags, Workplace, command_line, write_pairs
from tests.integration.test_score import read, token_pairs
from tests.integration.test_torchrun import start_ranks
from tests.models import save_tiny, stock_logps

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
STEPS = 60
LIMITS: Flags = {"preference_max_length": 128, "preference_max_completion_length": 64}


def write_orca(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows of Intel/orca_dpo_pairs' shape; the same pairs as message lists."""
    system, rows = {"role": "system", "content": "You help."}, read(write_pairs(path, count))
    for row in rows:
        row |= {side: [system, *row[side]] for side in ("chosen", "rejected")}
    with path.open("w") as file:
        for row in rows:
            answers = {side: row[side][-1]["content"] for side in ("chosen", "rejected")}
            orca = {"system": system["content"], "question": row["chosen"][1]["content"], **answers}
            file.write(json.dumps(orca) + "\n")
    return rows


def run(place: Workplace, module: str, *words: str, **flags: Any) -> str:
    """`python -m module words flags` to its good end; its standard output."""
    ended = place.server.start([*words, *command_line(flags)], directory=place.directory, module=module).wait()
    assert ended.code == 0, ended.err[-3000:]
    return ended.out


def stop_after_a_few_steps(arguments: list[str], log: Path) -> None:
    """Train under torchrun, and ask it to end as a scheduler would."""
    command = [sys.executable, "-m", *TORCHRUN, "-m", "relax.train", *arguments]
    place = log.parents[1]
    with (place / "stopped.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=place, env={**os.environ, **ENVIRONMENT}, stdout=out, stderr=out)
        deadline = time.monotonic() + TIMEOUT
        while not log.exists() or log.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, (place / "stopped.txt").read_text()
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


def test_the_whole_way(fresh_place: Workplace) -> None:
    place = fresh_place
    save_tiny(place.path("model"), "qwen3_moe", dtype=torch.bfloat16)
    rows = write_orca(place.path("orca.jsonl"), 20)

    config = ROOT / "configs/datasets/orca_rlhf.yaml"
    files = {"input": "orca.jsonl", "output_prefix": "tokens/orca", "tokenizer_name_or_path": "model", "workers": 1}
    place.path("tokens").mkdir()
    assert "tokens/orca: 20 rows" in run(place, "relax.preprocess", config=config, **files)

    run(place, "relax.convert", "hf-to-mcore", hf_checkpoint="model", save="mcore")
    assert run(place, "relax.convert", "verify", hf_checkpoint="model", load="mcore").startswith("equal")

    flags: Flags = {
        "hf_checkpoint": "model",
        "ref_load": "mcore",
        "prompt_data": "tokens/orca",
        "expert_model_parallel_size": 2,
        "num_rollout": STEPS,
        "no_bf16": None,
        "load": "run",
        "save": "run",
        **LIMITS,
    }
    stop_after_a_few_steps(place.arguments(**flags), place.path("log/run.jsonl"))
    stopped = int(place.path("run/latest_checkpointed_iteration.txt").read_text())
    assert 3 <= stopped < STEPS and f"stopped by signal 15 after step {stopped}" in place.path("stopped.txt").read_text()
    for rank in start_ranks(place, **flags):
        assert (ended := rank.wait()).code == 0, ended.err[-3000:]
    log = place.log("run")
    assert [line["train/step"] for line in log] == list(range(1, STEPS + 1))
    assert log[0]["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-14) and log[-1]["train/dpo/loss"] < 0.3

    run(place, "relax.convert", "mcore-to-hf", load="run", hf_checkpoint="model", save="policy")
    stock = transformers.AutoModelForCausalLM.from_pretrained(place.path("policy"))
    assert stock.dtype == torch.bfloat16 and stock.config.num_experts == 4

    flags = {"hf_checkpoint": "policy", "ref_load": "mcore", "no_bf16": True, "device": "cpu", **LIMITS}
    for data in ("orca.jsonl", "tokens/orca"):
        table = run(place, "relax.score", prompt_data=data, output=f"{Path(data).stem}-{len(data)}.jsonl", **flags)
        assert table.splitlines()[-1].split()[:2] == ["all", "20"]
    raw, tokenized = (read(path) for path in sorted(place.directory.glob("orca-*.jsonl")))
    assert raw == tokenized and sum(line["correct"] for line in raw) > 15
    expected = stock_logps(stock.float(), token_pairs(place.path("policy"), rows)).view(-1, 2)
    found = torch.tensor([[line["logps_chosen"], line["logps_rejected"]] for line in raw]).double()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
