"""SwiGLU keeps its input alone; values and gradients are torch's own composition's."""

import pytest
import torch
import torch.nn.functional as F

from tests.models import ops_for


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("shape", [(5, 1, 12), (3, 2, 130), (0, 1, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_the_compositions_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (8 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to(dtype)
    got = ops_for(dtype).swiglu(x)
    found = got, *torch.autograd.grad(got, x, grad)
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up
    for mine, theirs in zip(found, (expected, *torch.autograd.grad(expected, x, grad)), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine, theirs, rtol=4 * eps, atol=16 * eps)


@pytest.mark.usefixtures("elementwise")
def test_the_input_alone_is_kept() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops_for(torch.float32).swiglu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
