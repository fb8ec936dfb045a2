"""One warm server, one tiny model and one data set for all integration tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import Server, Workplace, write_pairs
from tests.models import save_tiny

NUM_PAIRS, NUM_EVAL = 20, 3  # 3 steps of 8, the last one short; fewer evaluation pairs than a batch


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts commands."""
    with Server(tmp_path_factory.mktemp("jobs")) as server:
        yield server


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ (a tiny Qwen3), train.jsonl and eval.jsonl; read only."""
    directory = tmp_path_factory.mktemp("assets")
    save_tiny(directory / "model", "qwen3")
    write_pairs(directory / "train.jsonl", NUM_PAIRS)
    write_pairs(directory / "eval.jsonl", NUM_EVAL, seed=1)
    return directory


@pytest.fixture(scope="module")
def place(server: Server, assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A directory of the test module's own, and flags of six DPO steps in fp32."""
    return workplace(server, assets, tmp_path_factory.mktemp("place"))


@pytest.fixture
def fresh_place(server: Server, assets: Path, tmp_path: Path) -> Workplace:
    """As `place`, of one test alone."""
    return workplace(server, assets, tmp_path)


def workplace(server: Server, assets: Path, directory: Path) -> Workplace:
    return Workplace(
        server=server,
        directory=directory,
        flags={
            "loss_type": "dpo",
            "hf_checkpoint": assets / "model",
            "prompt_data": assets / "train.jsonl",
            "preference_max_length": 128,
            "preference_max_completion_length": 64,
            "num_rollout": 6,
            "global_batch_size": 8,
            "max_tokens_per_gpu": 512,
            "lr": 1e-3,
            "no_bf16": True,
            "device": "cpu",
            "peak_tflops": 1,
        },
    )
