"""The lean RMS norm: torch's own values and gradients, without what autograd would keep."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from relax.backend.model.layers import RMSNorm
from tests.models import ops_for


def make(dtype: torch.dtype, *, shape: tuple[int, ...] = (7, 1, 24)) -> tuple[RMSNorm, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False, ops=ops_for(dtype)), shape[-1], eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(shape[-1], generator=generator))
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return norm, x.requires_grad_(), grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(7, 1, 24), (5, 1, 4, 16), (150, 1, 33), (0, 1, 24)], ids=str)
@pytest.mark.usefixtures("elementwise")
def test_values_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    norm, x, grad = make(dtype, shape=shape)
    got = norm(x)
    got.backward(grad)
    found = x.grad, norm.weight.grad
    x.grad = norm.weight.grad = None
    expected = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    expected.backward(grad)
    ulps = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(got, expected, rtol=max(ulps, torch.finfo(dtype).eps), atol=ulps)  # bf16: rounded once
    assert found[0].dtype == found[1].dtype == dtype
    for mine, theirs in zip(found, (x.grad, norm.weight.grad), strict=True):
        size = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * size)


def test_gradients_agree_with_finite_differences() -> None:
    norm, x, _ = make(torch.float64, shape=(3, 1, 6))
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(norm, {"weight": w}, x), (x, norm.weight))


@pytest.mark.usefixtures("elementwise")
def test_it_keeps_its_input_and_one_number_a_row() -> None:
    norm, x, _ = make(torch.bfloat16)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        norm(x)
    assert sorted(kept) == [7, 24, 7 * 24]
