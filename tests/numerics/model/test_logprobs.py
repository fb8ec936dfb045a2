"""Chunked log-probs against a full log-softmax: values and gradients, any chunk size, padding, dtype."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relax.backend.model.logprobs import target_logprobs
from relax.backend.ops import Ops, plain
from relax.backend.ops.cpu import products
from tests.models import ops_for

HIDDEN, VOCABULARY, PADDED = 24, 57, 61
ROWS = 23


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a weight whose padding rows would win every softmax, targets with the first and last id, a gradient."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64) / 3
    weight[VOCABULARY:] = 50 * hidden[:4]
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[:4] = torch.tensor([0, VOCABULARY - 1, 0, VOCABULARY - 1])
    grad = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), targets, grad


def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Values and gradients by torch's log_softmax over the real vocabulary, in fp64."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    values = (hidden @ weight[:VOCABULARY].t()).log_softmax(1).gather(1, targets[:, None])[:, 0]
    return [values.detach(), *torch.autograd.grad(values, (hidden, weight), grad)]


def chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad: torch.Tensor,
    *,
    chunk: int | None,
    ops: Ops | None = None,
) -> list[torch.Tensor]:
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
    values = target_logprobs(hidden, weight, targets, ops=ops or ops_for(hidden.dtype), vocab_size=VOCABULARY, chunk=chunk)
    return [values.detach(), *torch.autograd.grad(values, (hidden, weight), grad.to(values.dtype))]


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("chunk", [1, 7, ROWS, 1000, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunks_equal_a_full_log_softmax(dtype: torch.dtype, tolerance: float, chunk: int | None) -> None:
    case = inputs(dtype)
    found = chunked(*case, chunk=chunk)
    assert [x.dtype for x in found] == [dtype] * 3
    for value, expected in zip(found, full(*case), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_padding_rows_get_no_probability_and_no_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets, grad = inputs(dtype)
    found = chunked(hidden, weight, targets, grad, chunk=7)
    other = weight.clone()
    other[VOCABULARY:] = -3
    for value, same in zip(found, chunked(hidden, other, targets, grad, chunk=7), strict=True):
        assert torch.equal(value, same)
    assert (found[2][VOCABULARY:] == 0).all()
    assert (found[2][:VOCABULARY] != 0).any(1).all()


def test_probabilities_of_all_ids_sum_to_one() -> None:
    hidden, weight, _, _ = inputs(torch.float64)
    every = torch.arange(VOCABULARY)
    values = target_logprobs(
        hidden[:1].expand(VOCABULARY, -1), weight, every, ops=ops_for(torch.float64), vocab_size=VOCABULARY, chunk=7
    )
    torch.testing.assert_close(values.exp().sum(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-12, atol=0)


def test_equal_logits_give_a_uniform_distribution() -> None:
    values = target_logprobs(
        torch.ones(3, HIDDEN),
        torch.zeros(PADDED, HIDDEN),
        torch.tensor([0, 5, VOCABULARY - 1]),
        ops=ops_for(torch.float32),
        vocab_size=VOCABULARY,
    )
    torch.testing.assert_close(values, torch.full((3,), -float(torch.tensor(VOCABULARY).log())), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("elementwise")
def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets, grad = inputs(torch.float32)
    case = (hidden * 1e4, weight, targets, grad)
    for value, expected in zip(chunked(*case, chunk=7), full(*case), strict=True):
        assert value.isfinite().all()
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.usefixtures("elementwise")
def test_bf16_sums_in_fp32_and_rounds_gradients_once() -> None:
    case = inputs(torch.bfloat16)
    values, grad_hidden, grad_weight = chunked(*case, chunk=7)
    expected = full(*case)
    assert values.dtype == torch.float32 and grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    # A bf16 matrix unit rounds logits of up to about 8 to 2**-6; fp32 sums over them add nothing that shows.
    torch.testing.assert_close(values.double(), expected[0], rtol=0, atol=0.04)
    for value, wanted in zip((grad_hidden, grad_weight), expected[1:], strict=True):
        assert float((value.double() - wanted).norm() / wanted.norm()) < 0.02


def test_bf16_does_not_depend_on_the_chunk_size() -> None:
    case = inputs(torch.bfloat16)
    one, many = chunked(*case, chunk=1), chunked(*case, chunk=1000)
    torch.testing.assert_close(one[0], many[0], rtol=0, atol=0.04)
    for value, wanted in zip(one[1:], many[1:], strict=True):
        assert float((value.double() - wanted.double()).norm() / wanted.double().norm()) < 0.01


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weights_gradient_is_added_to_a_buffer(dtype: torch.dtype, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PRODUCT_ROWS", 10)  # several products for one buffer
    hidden, weight, targets, grad = inputs(dtype)
    expected = chunked(hidden, weight, targets, grad, chunk=7)[2]
    weight, buffer = torch.nn.Parameter(weight), torch.ones(PADDED, HIDDEN)
    values = target_logprobs(
        hidden, weight, targets, ops=ops_for(dtype), vocab_size=VOCABULARY, chunk=7, grad_into=buffer, ready=ready
    )
    values.backward(grad.to(values.dtype))
    assert float((buffer - 1 - expected).norm() / expected.float().norm()) < (1e-6 if dtype == torch.float32 else 0.01)
    assert (weight.grad is not None) == getattr(weight, "grad_added_to_main_grad", False) == ready


class Results(TorchDispatchMode):
    """The shapes of everything that operations give, in new memory."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.shapes = {x.untyped_storage().data_ptr() for x in known}, set[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.shapes.add(tuple(x.shape))
        return result


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", ["weight", "hidden", None])
def test_what_is_frozen_gets_no_gradient_nor_its_memory(frozen: str | None, dtype: torch.dtype, buffered: bool) -> None:
    hidden, weight, targets, grad = inputs(dtype)
    values, of_hidden, of_weight = chunked(hidden, weight, targets, grad, chunk=7)
    weight = torch.nn.Parameter(weight, requires_grad=frozen != "weight")
    hidden.requires_grad_(frozen != "hidden")
    buffer = torch.zeros(PADDED, HIDDEN, dtype=values.dtype) if buffered else None
    found = target_logprobs(hidden, weight, targets, ops=ops_for(dtype), vocab_size=VOCABULARY, chunk=7, grad_into=buffer)
    with Results(hidden, weight, *([] if buffer is None else [buffer])) as results:
        found.backward(grad.to(found.dtype))
    assert torch.equal(found, values)
    for x, expected, name in ((hidden, of_hidden, "hidden"), (weight, of_weight, "weight")):
        if name == frozen or (buffered and name == "weight"):
            assert x.grad is None
        else:
            assert torch.equal(x.grad, expected)
    if frozen == "weight":
        assert not {(PADDED, HIDDEN), (HIDDEN, PADDED)} & results.shapes
        assert buffer is None or (buffer == 0).all()
    if frozen == "hidden":
        assert hidden.shape not in results.shapes
    if not frozen and not buffered:
        assert (PADDED, HIDDEN) in results.shapes and hidden.shape in results.shapes  # what the others do without


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("chunk", [1, None])
def test_no_rows_give_zero_gradients(chunk: int | None) -> None:
    hidden, weight, targets, grad = inputs(torch.float32)
    values, grad_hidden, grad_weight = chunked(hidden[:0], weight, targets[:0], grad[:0], chunk=chunk)
    assert values.shape == (0,) and grad_hidden.shape == (0, HIDDEN)
    assert (grad_weight == 0).all()


def test_the_hidden_states_and_the_weight_are_left_as_they_were() -> None:
    hidden, weight, targets, grad = inputs(torch.float32)
    before = hidden.clone(), weight.clone()
    chunked(hidden, weight, targets, grad, chunk=7)
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_chunk_of_logits_lives_at_a_time(dtype: torch.dtype, elementwise: str) -> None:
    ops, made = ops_for(dtype), []

    def watched(*args: Any) -> torch.Tensor:
        """The same logits in memory of numpy's, which can be watched; what was made before must be gone."""
        assert not any(alive() for alive in made)
        result = ops.linear(*args)
        memory = np.empty(result.nbytes, dtype=np.uint8)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(result.dtype).view(result.shape).copy_(result)

    watching = replace(ops, linear=watched)
    if elementwise == "torch" or dtype == torch.float64:  # a few rows at a time
        logits = {name: partial(getattr(plain, name), part_bytes=16 * VOCABULARY) for name in ("logits_sum", "logits_gradient")}
        watching = replace(watching, **logits)
    gc.disable()  # only what nothing names is gone
    try:
        hidden, weight, targets, grad = inputs(dtype)
        chunked(hidden, weight, targets, grad, chunk=7, ops=watching)
    finally:
        gc.enable()
    assert len(made) == 4 + 3  # the last chunk is kept for backward
    assert not any(alive() for alive in made)
