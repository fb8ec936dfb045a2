"""Compiled kernels: right to the last bit where that is promised, built once, and torch's operations where they cannot be."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from relax.backend import kernels
from relax.backend.activation import SwiGLU
from relax.backend.kernels import choose_kernels, kernel

CPU = torch.device("cpu")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes the compiler a shell script, for kernels that nobody has built yet; gives the cache."""

    def compiler(script: str) -> Path:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        kernels._library.cache_clear()
        return tmp_path / "cache" / "relax"

    yield compiler
    kernels._library.cache_clear()


def compiled(name: str, like: torch.Tensor) -> Callable[..., None]:
    run = kernel(name, like)
    if run is None:
        pytest.skip(kernels.choose_kernels(CPU, like.dtype)[1])
    return run


def test_the_exponential_is_exact_to_two_units_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-87, 0, 100_001), torch.tensor([-88.0, -1e4, -torch.inf, torch.nan])))
    found, zero = x[None].clone(), torch.zeros(1)
    compiled("logits_gradient", found)(found, zero, -torch.ones(1), torch.zeros(1, dtype=torch.int64), zero, 1, x.numel())
    exact = x.double().exp()
    assert float((found[0, :-4].double() / exact[:-4] - 1).abs().max()) < 2 * torch.finfo(torch.float32).eps
    assert found[0, -4:-1].tolist() == [0.0, 0.0, 0.0]
    assert found[0, -1].isnan()


def test_bf16_is_rounded_to_nearest_even_as_torch_does() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:5] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0x00000001])  # ties, overflow, nan, denormal
    wide, found = bits.view(torch.float32), torch.empty(1 << 20, dtype=torch.bfloat16)
    compiled("from_groups", found)(wide, found, 1, 1, wide.numel())
    torch.testing.assert_close(found, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_norms_weight_gradient_does_not_depend_on_threads(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, x, weight = (torch.randn(shape, generator=generator) for shape in ((500, 48), (500, 48), (48,)))
    run = compiled("norm_backward", x)
    found, before = [], torch.get_num_threads()
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            parts = torch.empty(8, 48)
            run(grad, x, weight, torch.ones(500), torch.empty_like(x), parts, 500, 48, 64)
            found.append(parts)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_they_are_built_once(builds: Callable[[str], Path]) -> None:
    cache = builds('echo "$@" >> "$0.calls"; exec c++ "$@"')
    which, _ = choose_kernels(CPU, torch.float32)
    if which == "torch":
        pytest.skip("no C++ compiler")
    assert [f"compiled, {path.stem}" for path in cache.iterdir()] == [which]
    kernels._library.cache_clear()
    assert choose_kernels(CPU, torch.bfloat16)[0] == which
    calls = Path(f"{os.environ['CXX']}.calls").read_text().splitlines()
    assert [call.endswith("kernels.cpp") for call in calls] == [False, True, False]  # what it is, a build, what it is


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'broken beyond repair' >&2; exit 3", "broken beyond repair"),
        ("exit 3", "exit code 3"),
        ('[ "$1" = --version ] || { echo "error: -march=native: no" >&2; exit 1; }', "error: -march=native: no"),
        ('[ "$1" = --version ] || while [ $# -gt 0 ]; do [ "$1" != -o ] || echo no library > "$2"; shift; done', ".so"),
    ],
)
def test_without_them_torch_does_the_work_and_says_why(builds: Callable[[str], Path], script: str, reason: str) -> None:
    cache = builds(script)
    which, why = choose_kernels(CPU, torch.float32)
    assert which == "torch"
    assert reason in why and "CXX" in why
    assert not cache.exists() or not list(cache.glob("*.so"))
    x = torch.tensor([[1.0, 2.0]])
    assert SwiGLU(config=None)(x).item() == pytest.approx(2 / (1 + torch.tensor(-1.0).exp().item()))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels._library.cache_clear()
    assert "no-such-compiler" in choose_kernels(CPU, torch.float32)[1]
    kernels._library.cache_clear()


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64)])
def test_other_devices_and_dtypes_are_torchs(device: str, dtype: torch.dtype) -> None:
    assert choose_kernels(torch.device(device), dtype)[0] == "torch"
    assert kernel("add", torch.empty(1, device=device, dtype=dtype)) is None
