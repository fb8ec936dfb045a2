"""Matrix products on a CPU.

Large fp32 products with a transposed weight, a linear layer's forward, go to oneDNN: on CPUs without AVX512 MKL reaches half to
nine tenths of its rate there, and as much in the other two. Without AMX or AVX512-BF16 instructions torch's bf16 kernels run
several times slower than fp32 ones; there the operands are widened, multiplied in fp32 and rounded once, which is what a bf16
kernel with fp32 accumulation computes. With them, `products_of` makes fp32 products of bf16 values as fast. `device.py`
puts these in the place of what megatron-core calls.

Invariants: a product of bf16 matrices is the fp32 product rounded once; memory that is used again is never kept by autograd.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from relax.backend.ops.cpu import compiled, kernels
from relax.backend.ops.plain import PRODUCT_ROWS, slices


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 matrix instructions (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`Ops.widened`: fp32 for bf16 where the CPU has no bf16 instructions."""
    return tensor.float() if tensor.dtype == torch.bfloat16 and not cpu_multiplies_bf16() else tensor


@contextlib.contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """With bf16 instructions: products of fp32 operands that hold values of `dtype`. For bf16 they are exact, with
    fp32 sums and results, at the speed of bf16 (operands of more digits are rounded to bf16 once); for others nothing changes.
    """
    if dtype != torch.bfloat16 or not cpu_multiplies_bf16():
        yield
        return
    backend: Any = torch.backends.mkldnn
    setting = backend.matmul
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`Ops.linear`."""
    large = rows.size(0) * weight.numel() > LARGE and rows.size(1) > 1  # else the call costs more than it saves
    if large and rows.dtype == weight.dtype == torch.float32 and _has_onednn():
        return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")  # what torch.compile calls
    return _mm(rows, weight.t())


LARGE = 1 << 20  # multiplications
_mm = torch.mm  # itself, also while `multiply_on_cpu` is in its place


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply_on_cpu(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same product faster. megatron's linear layers call it inside autograd functions, where nobody keeps the operands;
    where autograd would record it, `_Product` is the record."""

    transposes = multiply is torch.nn.functional.linear

    @functools.wraps(multiply)
    def product(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        widens = a.dtype == b.dtype == torch.bfloat16 and not cpu_multiplies_bf16()
        if args or kwargs or not (widens or a.dtype == b.dtype == torch.float32):
            return multiply(a, b, *args, **kwargs)
        if b.dim() != 2 or a.dim() < 2:
            return multiply(a.float(), b.float()).to(a.dtype)
        rows, b = a.flatten(0, -2), b.t() if transposes else b
        result: torch.Tensor = _Product.apply(rows, b) if torch.is_grad_enabled() else _multiplied(rows, b)
        return result.unflatten(0, a.shape[:-1])

    return product


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] times b [k, n], both fp32, or both bf16 and widened in memory that every product uses again."""
    wide_a, wide_b = (a, b) if a.dtype == torch.float32 else (_widened_once(a, "a"), _widened_once(b, "b"))
    return (_mm(wide_a, wide_b) if b.is_contiguous() else linear(wide_a, wide_b.t())).to(a.dtype)


class _Product(torch.autograd.Function):
    """`_multiplied` and its gradients: with a policy's own products a reference pass would give other bits."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return _multiplied(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (a, b), (of_a, of_b) = ctx.saved_tensors, ctx.needs_input_grad
        return _multiplied(grad, b.t()) if of_a else None, _multiplied(grad.t(), a).t() if of_b else None


def _widened_once(matrix: torch.Tensor, use: str) -> torch.Tensor:
    """A bf16 matrix in fp32 with the same strides, good until the next call for the same `use`."""
    if matrix.is_contiguous():
        return scratch(use, matrix.numel()).view(matrix.shape).copy_(matrix)
    if matrix.t().is_contiguous():
        return scratch(use, matrix.numel()).view(matrix.t().shape).copy_(matrix.t()).t()
    return matrix.float()


_SCRATCH: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def scratch(use: str, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The first `size` elements of memory kept for `use`: fresh pages cost a CPU more than the work in them."""
    kept = _SCRATCH.get((use, dtype))
    if kept is None or kept.numel() < size:
        kept = _SCRATCH[use, dtype] = torch.empty(size, dtype=dtype)
    return kept[:size]


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    """`Ops.add_weight_gradient`, in one product where it has the dtype of total."""
    if not cpu_multiplies_bf16():
        grad, rows = (_widened_once(x, use) if x.dtype == torch.bfloat16 else x for x, use in ((grad, "b"), (rows, "a")))
    if grad.dtype == rows.dtype == total.dtype:
        total.addmm_(grad.t(), rows)
    else:
        for part in slices(total.size(0), PRODUCT_ROWS):
            add_to_wide(total[part], grad[:, part].t() @ rows)


def add_to_wide(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add `part` to wider `total` of the same shape [rows, columns]."""
    if kernels.compiles(part.dtype) and total.is_contiguous() and part.is_contiguous():
        compiled.add(total, part)
    else:
        for rows in slices(part.size(0), 4096):  # torch widens all that it is given
            total[rows].add_(part[rows])
