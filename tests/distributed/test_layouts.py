"""Two processes under each layout give what one process gives: hashes, exports, scores, losses, gradient norms, weights.

So do runs that resume under it what another layout saved, and one process that resumes what it saved.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.backend.engine import Engine
from relax.backend.model.families import read_hf_config
from relax.backend.weights.export import export_hf
from relax.backend.weights.hugging_face import weight_hashes
from tests.engines import (
    BATCHES,
    COUPLED,
    UNMOVED,
    assert_near,
    assert_saved_alike,
    coupled_steps,
    make_engine,
    train_and_resume,
)
from tests.models import load, random_pairs, save_tiny, scores

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("layouts_worker.py")
ROOT = Path(__file__).parents[2]
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {  # each resumes what the one before it saved, with both kinds of optimizer
    "dp2": {},
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "pp2-interleaved": {"pipeline": 2, "layers_per_virtual_stage": 1},
    "cp2": {"context": 2},
    "dp2-distributed-overlap": {"distributed": True},
    "pp2-distributed": {"pipeline": 2, "distributed": True},
    "tp2-sp-distributed-recompute": {"tensor": 2, "sequence": True, "distributed": True, "overrides": RECOMPUTE},
}
MODELS: dict[str, dict[str, Any]] = {  # an odd vocabulary pads its last shard
    "qwen3 untied": {"family": "qwen3", "vocab_size": 271},
    "qwen2 tied": {"family": "qwen2", "vocab_size": 271, "tie_word_embeddings": True},
    "llama reward": {"family": "llama", "head": "scalar"},
    "mistral new reward head": {"family": "mistral", "tie_word_embeddings": True},
}
TRAINED = ("qwen2 tied", "llama reward")


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
        if name == next(iter(MODELS)):
            results["coupled"] = coupled_steps(make_engine(root / name, COUPLED, options=None, seed=5))
        if name in TRAINED:
            engine = unprepared(root / name)
            results[name]["trained"] = train_and_resume(engine, distributed=True, save=root / "one" / "saved" / name)
    copy = root / "contradiction"
    save_tiny(copy, "llama", num_hidden_layers=4, tie_word_embeddings=True)
    tensors = load_file(copy / "model.safetensors")
    output = tensors["model.embed_tokens.weight"].clone()
    output[-1] += 1  # in the last shard's rows
    save_file({**tensors, "lm_head.weight": output}, copy / "model.safetensors")
    return results


def head_of(name: str) -> str:
    return "scalar" if "reward" in name else "lm"


@pytest.fixture(scope="module")
def two_process_results(one_process_results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with each layout's exports and both ranks' findings."""
    root, directory = one_process_results["root"], tmp_path_factory.mktemp("layouts")
    models = {str(root / name): head_of(name) for name in MODELS}
    job: dict[str, Any] = {"layouts": LAYOUTS, "models": models, "trained": TRAINED, "seed": 5}
    job["contradiction"] = str(root / "contradiction")
    (directory / "job.json").write_text(json.dumps(job))
    (directory / "one").symlink_to(root / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(WORKER), str(directory)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_agree_with_one_process(one_process_results: dict[str, Any], two_process_results: Path, layout: str) -> None:
    root, directory = one_process_results["root"], two_process_results / layout
    found = [torch.load(directory / f"rank{rank}.pt") for rank in (0, 1)]
    for name in MODELS:
        expected = one_process_results[name]
        for rank in found:
            assert rank[name]["hashes"] == expected["hashes"], name
        torch.testing.assert_close(torch.tensor(found[0][name]["scores"]), expected["scores"], rtol=1e-5, atol=1e-6)
        for file in (root / f"{name} exported").iterdir():
            assert (directory / name / file.name).read_bytes() == file.read_bytes(), (name, file.name)
    assert "lm_head.weight differs from model.embed_tokens.weight" in found[0]["error"]
    assert found[1]["error"] == found[0]["error"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_agrees_with_one_process(one_process_results: dict[str, Any], two_process_results: Path, layout: str) -> None:
    found = [torch.load(two_process_results / layout / f"rank{rank}.pt") for rank in (0, 1)]
    for name in TRAINED:
        trained = found[0][name]["trained"]
        assert trained["values"] == found[1][name]["trained"]["values"]  # every rank has every pair's
        if head_of(name) == "lm":
            for dtype in (torch.float32, torch.bfloat16):
                assert found[0][name][f"start, {dtype}"] == UNMOVED, dtype
        assert_like_one_process(trained, one_process_results[name]["trained"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_continues_under_any_layout(
    one_process_results: dict[str, Any], two_process_results: Path, layout: str
) -> None:
    """Under this layout from the one before it, the first from one process; in one process from this layout's checkpoint; each
    time with a distributed optimizer and without, whichever saved it."""
    found = torch.load(two_process_results / layout / "rank0.pt")
    for name in TRAINED:
        expected = one_process_results[name]["trained"]
        saved = two_process_results / layout / "saved" / name
        for distributed in (False, True):
            assert_like_one_process(found[name]["resumed"][distributed], expected)
            engine = unprepared(one_process_results["root"] / name)
            assert_like_one_process(train_and_resume(engine, distributed=distributed, load=saved), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_coupled_objective_agrees_with_one_process(
    one_process_results: dict[str, Any], two_process_results: Path, layout: str
) -> None:
    found = [torch.load(two_process_results / layout / f"rank{rank}.pt")["coupled"] for rank in (0, 1)]
    assert found[0] == found[1]
    *steps, state = one_process_results["coupled"]
    for (values, norm), (expected, expected_norm), tolerance in zip(found[0][:2], steps, (1e-5, 1e-4), strict=True):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=tolerance, atol=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert found[0][2] == pytest.approx(state, rel=1e-4) and all(state.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_the_optimizers_kind_keeps_its_bits(
    one_process_results: dict[str, Any], two_process_results: Path, layout: str
) -> None:
    """Master weights, moments and steps in bf16."""
    for name in TRAINED:
        build = partial(unprepared, one_process_results["root"] / name, dtype=torch.bfloat16)
        assert_saved_alike(build, two_process_results / layout / "bf16" / name)


def unprepared(model: Path, **options: Any) -> Engine:
    return make_engine(model, "dpo" if head_of(model.name) == "lm" else "rm", options=None, seed=5, **options)


def assert_like_one_process(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses and other values of each pair, norms and weights; a resumed run has only its last steps."""
    steps = len(found["norms"])
    for step in range(-1, -2 - steps, -1):
        values, wanted = (torch.tensor(run["values"][step], dtype=torch.float64) for run in (found, expected))
        tolerance = 1e-5 if step == -1 - len(BATCHES) else 1e-4  # beyond the first step Adam's signs differ where g is about 0
        torch.testing.assert_close(values, wanted, rtol=tolerance, atol=tolerance)
    assert found["norms"][0] == pytest.approx(expected["norms"][-steps], rel=1e-5 if steps == len(BATCHES) else 1e-4)
    assert found["norms"] == pytest.approx(expected["norms"][-steps:], rel=1e-4)
    assert_near(found["weights"], expected["weights"], tolerance=1e-4)
