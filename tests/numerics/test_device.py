"""Which device a process takes, and what it sets there."""

import os
from collections.abc import Iterator

import pytest
import torch

from relax.backend.device import select_device
from relax.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch as it speaks on a machine with two GPUs; the list of those that were set."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield taken
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_process_takes_the_gpu_of_its_local_rank_and_its_deterministic_kernels(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert select_device("auto") == torch.device("cuda", 1)
    assert two_gpus == [1]
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_local_rank_without_a_gpu_is_refused(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK 2 has no GPU: 2 are visible"):
        select_device("cuda")


def test_a_cpu_is_taken_where_it_is_asked_for_or_nothing_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == select_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device"):
        select_device("cuda")
