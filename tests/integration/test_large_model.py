"""The run script of the 30-billion-parameter model, planned where it does not fit: from a config, a tokenizer and pairs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.integration.command import ENVIRONMENT, ROOT
from tests.models import save_tokenizer

pytestmark = pytest.mark.integration

SCRIPT = ROOT / "scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh"
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
GPU = 80e9 / 2**30  # GiB


def test_the_plan_fits_sixteen_gpus(tmp_path: Path) -> None:
    transformers.Qwen3MoeConfig(**SHAPE).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    with (tmp_path / "orca.jsonl").open("w") as file:
        for i in range(128):
            row = {"system": "You help.", "question": f"{i}?" * 40, "chosen": f"{i}!" * 60, "rejected": "no" * (i + 1)}
            file.write(json.dumps(row) + "\n")
    done = subprocess.run(
        ["bash", str(SCRIPT), "--dry-run", "--world-size", "16"],
        cwd=tmp_path,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_CHECKPOINT": "model",
            "PROMPT_DATA": "orca.jsonl",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train: 128 of 128 rows kept" in done.stdout
    assert "1000 steps of 64 pairs, 2 an epoch, 4 data-parallel ranks" in done.stdout
    table = done.stdout[done.stdout.index("memory of a rank, GiB") :].splitlines()
    assert table[0].split()[-2:] == ["first", "last"]
    rows = {row[:56].strip(): [float(value) for value in row[56:].split()] for row in table[1:] if row.strip()}
    layer = (
        2048 * (4096 + 2 * 512) // 2 + 4096 // 2 * 2048 + 2 * 2048 + 2 * 128 + 2048 * 128
    )  # attention over TP 2, norms, router
    experts, vocabulary = 128 // 8 * 3 * 2048 * 768, 151936 // 2 * 2048
    first = 24 * (layer + experts) + vocabulary
    assert rows["(M parameters)"] == [round(first / 1e6, 1), round((first + 2048) / 1e6, 1)]
    assert rows["parameters"][0] == pytest.approx(2 * first / 2**30, abs=0.01)
    assert rows["gradients, fp32"][0] == pytest.approx(4 * first / 2**30, abs=0.01)
    shared = 24 * layer + vocabulary  # a rank's experts are nobody else's: only the rest is split over the 4 ranks
    optimizer = 12 * (shared / 4 + 24 * experts) / 2**30
    assert rows["master weights and Adam moments, fp32"][0] == pytest.approx(optimizer, abs=0.01)
    assert 40 < max(rows["sum"]) < 0.8 * GPU
