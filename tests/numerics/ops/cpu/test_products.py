"""Products on a CPU: bf16 ones without bf16 instructions are the fp32 ones rounded once, whoever asks; fp32 ones are exact."""

import pytest
import torch

from relax.backend.device import on_device
from relax.backend.ops.cpu import products
from relax.backend.ops.cpu.products import LARGE, add_to_wide, add_weight_gradient, linear, products_of

CPU = torch.device("cpu")
THIS_CPU = products.cpu_multiplies_bf16


@pytest.fixture(autouse=True)
def no_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam as such a CPU sees it, wherever the test runs."""
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_a_bf16_product_is_the_fp32_one_rounded_once(transposed: bool, grad_mode: bool) -> None:
    x, w = matrices((3, 2, 8), (5, 8) if transposed else (8, 5))
    right = w.t() if transposed else w
    with on_device(CPU), torch.set_grad_enabled(grad_mode):
        first = torch.matmul(x, right)
        torch.matmul(-x, -right)  # the memory of the first product's operands is in use again
        method = x.matmul(right)
        linear = torch.nn.functional.linear(x, right.t())
    expected = (x.float() @ right.float()).bfloat16()
    assert torch.equal(first, expected)
    assert torch.equal(method, expected)
    assert torch.equal(linear, expected)


def test_a_product_that_autograd_records_keeps_its_own_operands() -> None:
    x, w = (tensor.requires_grad_() for tensor in matrices((3, 8), (8, 5)))
    with on_device(CPU):
        y = torch.mm(x, w)
        with torch.no_grad():
            torch.mm(-x, -w)
        y.sum().backward()
    assert torch.equal(x.grad, w.detach().float().sum(1).bfloat16().expand(3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 300])  # on both sides of where oneDNN takes over
def test_a_product_has_the_same_bits_where_autograd_records_it(rows: int, dtype: torch.dtype) -> None:
    """Else a policy would not start at its reference; its gradients are those of torch's own product."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 2, 400), (120, 400), (rows, 2, 120))
    x, w, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    assert (2 * rows * w.numel() > LARGE) == (rows == 300)
    x.requires_grad_(), w.requires_grad_()
    with on_device(CPU):
        for multiply in (torch.nn.functional.linear, lambda x, w: torch.matmul(x, w.t())):
            with torch.no_grad():
                expected = multiply(x, w)
            found = multiply(x, w)
            assert torch.equal(found, expected)
            grads = torch.autograd.grad(found, (x, w), grad)
            exact = (grad.double() @ w.double(), grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1))
            for part, whole in zip(grads, exact, strict=True):
                torch.testing.assert_close(part.double(), whole, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_is_added_to_the_fp32_buffer_unrounded(dtype: torch.dtype) -> None:
    x, grad = (tensor.to(dtype) for tensor in matrices((6, 4), (6, 3)))
    buffer = torch.ones(3, 4)
    add_weight_gradient(buffer, grad, x)
    torch.testing.assert_close(buffer, 1 + grad.float().t() @ x.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("strided", [False, True])
def test_bf16_is_added_to_fp32_unrounded(strided: bool) -> None:
    (part,) = matrices((3, 5000)) if strided else matrices((5000, 3))
    part, total = part.t() if strided else part, torch.full((5001, 3), 1 / 3)
    add_to_wide(total[1:], part)
    assert torch.equal(total, torch.cat((torch.full((1, 3), 1 / 3), 1 / 3 + part.float())))


@pytest.mark.parametrize("rows", [3, 300])  # on both sides of where oneDNN takes over
@pytest.mark.parametrize("strided", [False, True])
def test_a_product_with_a_transposed_weight_is_exact_to_fp32(rows: int, strided: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 96, generator=generator) for n in (rows, 120))
    assert (rows * w.numel() > LARGE) == (rows == 300)
    if strided:
        x, w = x[:, 1:95], w[:, 1:95]
    expected = x.double() @ w.double().t()
    with on_device(CPU), torch.no_grad():
        found = (
            linear(x, w),
            torch.matmul(x, w.t()),
            x.matmul(w.t()),
            torch.nn.functional.linear(x[:, None], w)[:, 0],
        )
    for product in found:
        assert product.dtype == torch.float32
        torch.testing.assert_close(product.double(), expected, rtol=0, atol=3e-5)


def test_fp64_stays_fp64() -> None:
    x, w = (torch.randn(n, 96, dtype=torch.float64) for n in (300, 120))
    assert torch.equal(linear(x, w), x @ w.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp32_products_of_a_dtypes_values_are_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever instructions this CPU has: sums are fp32, and fp32 values are not rounded on the way."""
    monkeypatch.setattr(products, "cpu_multiplies_bf16", THIS_CPU)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype).float() for shape in ((2, 48, 96), (2, 96, 64)))
    with products_of(dtype):
        result = torch.bmm(a, b)
    exact = a.double() @ b.double()
    assert float((result - exact).abs().max()) < 1e-4
    rounded = a[0].bfloat16().float() @ b[0].bfloat16().float()
    assert dtype == torch.bfloat16 or float((rounded - exact[0]).abs().max()) > 1e-2  # what rounding would have cost


def test_the_precision_of_other_products_is_put_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: True)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), products_of(torch.bfloat16):
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert torch.backends.mkldnn.matmul.fp32_precision == before
