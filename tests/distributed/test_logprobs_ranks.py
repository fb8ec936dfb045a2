"""Log-probs with the vocabulary split over two processes: the shard that does not own a label still learns from it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
HIDDEN = 16
CASES: dict[str, dict[str, Any]] = {
    "even": {"vocab_size": 40, "shard": 20, "dtype": torch.float64},
    "odd": {"vocab_size": 41, "shard": 21, "dtype": torch.float64},  # the last shard ends in padding
    "odd fp32": {"vocab_size": 41, "shard": 21, "dtype": torch.float32},
    "odd bf16": {"vocab_size": 41, "shard": 21, "dtype": torch.bfloat16},
    "one row at a time": {"vocab_size": 41, "shard": 21, "dtype": torch.float64, "chunk": 1},
    "a shard of padding": {"vocab_size": 21, "shard": 21, "dtype": torch.float64},
    "labels of the first shard only": {"vocab_size": 40, "shard": 20, "dtype": torch.float64, "below": 20},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def case(*, vocab_size: int, shard: int, dtype: torch.dtype, chunk: int = 3, below: int | None = None) -> dict[str, Any]:
    """Targets at both ends of every shard and between; padding rows that would win every softmax."""
    generator = torch.Generator().manual_seed(vocab_size)
    targets = torch.cat((torch.tensor([0, shard - 1, shard, vocab_size - 1]), torch.arange(1, vocab_size, 5)))
    targets = targets[targets < (below or vocab_size)]
    hidden = torch.randn(len(targets), HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(2 * shard, HIDDEN, generator=generator, dtype=torch.float64) / 3
    weight[vocab_size:] = 50 * hidden[0]
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "targets": targets,
        "grad": torch.rand(len(targets), generator=generator, dtype=torch.float64) + 0.5,
        "vocab_size": vocab_size,
        "chunk": chunk,
    }


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    return {name: case(**options) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def found(cases: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[torch.Tensor]]]:
    """What each rank computes."""
    directory = tmp_path_factory.mktemp("ranks")
    torch.save(cases, directory / "cases.pt")
    worker = Path(__file__).with_name("logprobs_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(worker), str(directory)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(directory / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_shards_equal_a_full_log_softmax(name: str, cases: dict[str, Any], found: list[dict[str, Any]]) -> None:
    one, tolerance = cases[name], TOLERANCE[CASES[name]["dtype"]]
    hidden, weight = (one[x].double().requires_grad_() for x in ("hidden", "weight"))
    values = (hidden @ weight[: one["vocab_size"]].t()).log_softmax(1).gather(1, one["targets"][:, None])[:, 0]
    grad_hidden, grad_weight = torch.autograd.grad(values, (hidden, weight), one["grad"])
    for rank, expected in enumerate(grad_weight.chunk(2)):
        for part, wanted in zip(found[rank][name], (values, grad_hidden, expected), strict=True):
            torch.testing.assert_close(part.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[0][name][0], found[1][name][0])
    assert torch.equal(found[0][name][1], found[1][name][1])


def test_gradient_reaches_the_shard_that_owns_no_label(found: list[dict[str, Any]]) -> None:
    _, _, grad_weight = found[1]["labels of the first shard only"]
    assert (grad_weight != 0).all(1).all()


@pytest.mark.parametrize("name", ["odd", "odd fp32", "odd bf16", "a shard of padding"])
def test_padding_rows_get_no_gradient(name: str, found: list[dict[str, Any]]) -> None:
    real = CASES[name]["vocab_size"] - CASES[name]["shard"]
    assert (found[1][name][2][real:] == 0).all()
