"""Weights on several processes: hashes, exports and scores do not depend on the parallel layout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.backend.export import export_hf
from relax.backend.model import read_hf_config
from relax.backend.weights import weight_hashes
from tests.models import load, random_pairs, save_tiny, scores

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("weights_worker.py")
ROOT = Path(__file__).parents[2]
LAYOUTS = {  # name: sizes of tensor and pipeline, layers per virtual stage
    "tp2": (2, 1, None),
    "pp2": (1, 2, None),
    "pp2-interleaved": (1, 2, 1),
    "dp2": (1, 1, None),
}
MODELS: dict[str, dict[str, Any]] = {  # an odd vocabulary pads its last shard
    "qwen3 untied": {"family": "qwen3", "vocab_size": 271},
    "qwen2 tied": {"family": "qwen2", "vocab_size": 271, "tie_word_embeddings": True},
    "llama reward": {"family": "llama", "head": "scalar"},
    "mistral new reward head": {"family": "mistral", "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def one_process_results(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Per model, saved under its name: what one process finds."""
    root = tmp_path_factory.mktemp("models")
    results: dict[str, Any] = {"root": root}
    for name, options in MODELS.items():
        save_tiny(root / name, num_hidden_layers=4, **options)
        model = load(root / name, head=head_of(name), seed=5)
        config = read_hf_config(root / name)
        export_hf([model], config, source=root / name, output=root / f"{name} exported")
        pairs = random_pairs(vocab_size=config.vocab_size)
        results[name] = {"hashes": weight_hashes([model], config), "scores": scores(model, pairs)}
    copy = root / "contradiction"
    save_tiny(copy, "llama", num_hidden_layers=4, tie_word_embeddings=True)
    tensors = load_file(copy / "model.safetensors")
    output = tensors["model.embed_tokens.weight"].clone()
    output[-1] += 1  # in the last shard's rows
    save_file({**tensors, "lm_head.weight": output}, copy / "model.safetensors")
    return results


def head_of(name: str) -> str:
    return "scalar" if "reward" in name else "lm"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_process(one_process_results: dict[str, Any], tmp_path: Path, layout: str) -> None:
    root = one_process_results["root"]
    job = {"layout": LAYOUTS[layout], "models": {str(root / name): head_of(name) for name in MODELS}, "seed": 5}
    job["contradiction"] = str(root / "contradiction")
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(WORKER), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for name in MODELS:
        expected = one_process_results[name]
        for rank in found:
            assert rank[name]["hashes"] == expected["hashes"], name
        torch.testing.assert_close(torch.tensor(found[0][name]["scores"]), expected["scores"], rtol=1e-5, atol=1e-6)
        for file in (root / f"{name} exported").iterdir():
            assert (tmp_path / name / file.name).read_bytes() == file.read_bytes(), (name, file.name)
    assert "lm_head.weight differs from model.embed_tokens.weight" in found[0]["error"]
    assert found[1]["error"] == found[0]["error"]
