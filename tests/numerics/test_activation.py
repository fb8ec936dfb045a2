"""SwiGLU keeps its input alone and changes no bit of torch's own composition, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from relax.backend.activation import SwiGLU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_the_compositions_own_bit_for_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 1, 12, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 1, 6, generator=generator).to(dtype)
    swiglu = SwiGLU(config=None)
    got = swiglu(x)
    got.backward(grad)
    found, x.grad = x.grad, None
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(grad)
    assert torch.equal(got, expected)
    assert torch.equal(found, x.grad)


def test_the_input_alone_is_kept() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        SwiGLU(config=None)(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
