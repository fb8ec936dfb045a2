"""Which device a process takes, and what it sets there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from relax.backend.device import collectives_backend, describe, fuses_weight_gradients, select_device, wait_until_sent
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


def test_what_follows_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, waits = torch.device("cpu"), torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: waits.append("all")))
    assert [collectives_backend(device) for device in (cpu, cuda)] == ["gloo", "nccl"]
    assert [describe(device) for device in (cpu, cuda)] == [f"cpu, {torch.get_num_threads()} threads", "GPU 0"]
    assert [fuses_weight_gradients(device) for device in (cpu, cuda)] == [True, False]
    wait_until_sent(cpu)
    assert not waits
    wait_until_sent(cuda)
    assert waits == ["all"]


def test_a_local_rank_without_a_gpu_is_refused(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK 2 has no GPU: 2 are visible"):
        select_device("cuda")


def test_a_cpu_is_taken_where_it_is_asked_for_or_nothing_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device("auto") == select_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device"):
        select_device("cuda")


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNT_FAULTS = """
import resource
import relax.backend
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(16 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system has no huge pages")
def test_large_tensors_lie_in_huge_pages() -> None:
    """64 MB: 32 page faults of 2 MB; 16,384 of 4 KB. A process of its own, since torch decides with its first tensor."""
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    output = subprocess.run([sys.executable, "-c", COUNT_FAULTS], env=environment, check=True, capture_output=True, text=True)
    assert int(output.stdout) < 8000
