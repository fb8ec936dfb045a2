"""Every operator of every record that a CPU can run: torch's plain operations' own values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relax.backend.ops import PLAIN, Ops, choose_ops
from relax.backend.ops.cpu import kernels, products
from tests.models import ops_for

CUDA = torch.device("cuda")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(params=["cpu", "cpu, no compiler", "cpu, no bf16 instructions", "cuda"])
def record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], Ops]:
    """A record by dtype; a GPU's is made of operations that a CPU has, too."""
    if request.param == "cuda":
        return lambda dtype: choose_ops(CUDA, dtype, head_dim=8, attention="sdpa")
    if request.param == "cpu, no compiler":
        monkeypatch.setattr(kernels, "library", lambda: "there is none in this test")
    if request.param == "cpu, no bf16 instructions":
        monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    return ops_for


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """As near as two ways of rounding to `dtype`."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    size = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(dtype).eps * size)


def case(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[Any]]:
    """Inputs with gradients, and the others."""
    if name == "rms_norm":
        return drawn(dtype, (70, 1, 24), (24,)), [1e-5]
    if name == "swiglu":
        return drawn(dtype, (7, 1, 48)), []
    if name == "rotate":
        x, cos, sin = drawn(dtype, (5, 1, 3, 8), (5, 1, 1, 4), (5, 1, 1, 4))
        return [x], [cos, sin]
    return drawn(dtype, (16, 32), (4, 24, 32)), [torch.tensor([3, 0, 5, 8])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotate", "grouped_linear"])
def test_operators_with_gradients(record: Callable[[torch.dtype], Ops], name: str, dtype: torch.dtype) -> None:
    inputs, rest = case(name, dtype)
    found = []
    for ops in (record(dtype), PLAIN):
        own = [x.clone().requires_grad_() for x in inputs]
        out = getattr(ops, name)(*own, *rest)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), own)))
    for mine, plain in zip(*found, strict=True):
        assert_near(mine, plain, dtype)


@pytest.mark.parametrize("counts", [[0, 0, 16, 0], [16, 0, 0, 0], [0, 0, 0, 16], [0, 0, 0, 0]])
@pytest.mark.parametrize("width", [32, 30])  # a grouped product takes steps of 16 bytes
def test_groups_without_rows(record: Callable[[torch.dtype], Ops], counts: list[int], width: int) -> None:
    rows, weights = drawn(torch.bfloat16, (sum(counts), width), (4, 24, width))
    args = rows, weights, torch.tensor(counts)
    assert_near(record(torch.bfloat16).grouped_linear(*args), PLAIN.grouped_linear(*args), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 300])  # on both sides of where oneDNN takes over
def test_products(record: Callable[[torch.dtype], Ops], dtype: torch.dtype, rows: int) -> None:
    ops, (x, weight, grad) = record(dtype), drawn(dtype, (rows, 96), (120, 96), (rows, 120))
    assert torch.equal(ops.widened(weight).to(dtype), weight)
    assert_near(ops.linear(x, weight), PLAIN.linear(x, weight), dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found, exact = (torch.ones(120, 96, dtype=d) for d in (wide, torch.float64))
    ops.add_weight_gradient(found, grad, x)
    PLAIN.add_weight_gradient(exact, grad.double(), x.double())
    assert_near(found.double(), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits(record: Callable[[torch.dtype], Ops], dtype: torch.dtype) -> None:
    wide, column = torch.promote_types(dtype, torch.float32), torch.arange(9)[:, None]
    (z,), (grad, at_target) = drawn(dtype, (9, 50)), drawn(wide, (9, 1), (9, 1))
    found = []
    for ops in (record(dtype), PLAIN):
        own, top, total = z.clone(), torch.empty(9, dtype=wide), torch.empty(9, dtype=wide)
        ops.logits_sum(own, top, total)
        assert torch.equal(own, z) and torch.equal(top, z.amax(1).to(wide))
        ops.logits_gradient(own, top + total.log(), grad, column, at_target)
        found.append((total, own))
    for (mine, plain), rounded in zip(zip(*found, strict=True), (wide, dtype), strict=True):
        assert_near(mine, plain, rounded)


def test_a_record_says_what_was_chosen(record: Callable[[torch.dtype], Ops]) -> None:
    choices = record(torch.float32).choices
    assert list(choices) == ["attention", "elementwise work"]
    assert all(choice.name and choice.why for choice in choices.values())
