"""Fixtures that several kinds of tests share."""

from collections.abc import Iterator

import pytest
import torch

from relax.backend import parallel
from relax.backend.device import on_device
from relax.backend.ops.cpu import kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def one_process() -> Iterator[None]:
    """Process groups of a world of one, on gloo, for code that asks megatron where it is."""
    parallel.initialize(parallel.ParallelConfig(), device=CPU, seed=0)
    yield
    parallel.shutdown()


@pytest.fixture
def on_cpu(one_process: None) -> Iterator[None]:
    """`one_process`, with the test's body inside the CPU seam."""
    with on_device(CPU):
        yield


@pytest.fixture(params=["compiled", "torch"])
def elementwise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test with compiled kernels, and with torch's operations as on a machine without a compiler."""
    which: str = request.param
    if which == "torch":
        monkeypatch.setattr(kernels, "library", lambda: "there is none in this test")
    elif isinstance(reason := kernels.library(), str):
        pytest.skip(reason)
    return which
