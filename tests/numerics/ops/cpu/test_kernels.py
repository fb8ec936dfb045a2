"""Compiled kernels: right to the last bit where that is promised, and kept as `kernel_cache` says; else torch's operations."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from relax.backend.ops import PLAIN, Choice
from relax.backend.ops.cpu import compiled, kernel_cache, kernels
from tests.models import ops_for


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Makes the compiler a shell script, for kernels that nobody has built yet; gives the cache."""

    def make_compiler(script: str) -> Path:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        kernels.library.cache_clear()
        return tmp_path / "cache" / "relax" / "kernels"

    yield make_compiler
    kernels.library.cache_clear()


def elementwise_work(dtype: torch.dtype) -> Choice:
    return ops_for(dtype).choices["elementwise work"]


@pytest.fixture
def built() -> None:
    if isinstance(reason := kernels.library(), str):
        pytest.skip(reason)


@pytest.mark.usefixtures("built")
def test_the_exponential_is_exact_to_two_units_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-87, 0, 100_001), torch.tensor([-88.0, -1e4, -torch.inf, torch.nan])))
    found, zero = x[None].clone(), torch.zeros(1, 1)
    compiled.logits_gradient(found, zero, -torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), zero)
    exact = x.double().exp()
    assert float((found[0, :-4].double() / exact[:-4] - 1).abs().max()) < 2 * torch.finfo(torch.float32).eps
    assert found[0, -4:-1].tolist() == [0.0, 0.0, 0.0]
    assert found[0, -1].isnan()


@pytest.mark.usefixtures("built")
def test_bf16_is_rounded_to_nearest_even_as_torch_does() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:5] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0x00000001])  # ties, overflow, nan, denormal
    wide, found = bits.view(1, 1, -1).view(torch.float32), torch.empty(1, 1, 1 << 20, dtype=torch.bfloat16)
    compiled.from_groups(wide, found)
    torch.testing.assert_close(found, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_norms_weight_gradient_does_not_depend_on_threads(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grad, x, weight = (torch.randn(shape, generator=generator) for shape in ((500, 48), (500, 48), (48,)))
    found, before = [], torch.get_num_threads()
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            found.append(compiled.norm_backward(grad, x, weight, torch.ones(500, 1))[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.usefixtures("built")
def test_a_kernel_takes_the_dtypes_that_it_declares_and_no_other() -> None:
    """It would read past the end of narrower tensors."""
    total, part = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)
    compiled.add(total, part)
    assert torch.equal(total, torch.ones(2, 3))
    for wrong in ((part, part), (total.double(), part), (total.to("meta"), part)):
        with pytest.raises(AssertionError, match=r"^add: torch\.\w+ on \w+, not torch\.float32$"):
            compiled.add(*wrong)
    with pytest.raises(AssertionError, match="^norm_forward: "):
        compiled.norm_forward(part, torch.ones(3), 1e-6)


def test_they_are_built_once(builds: Callable[[str], Path]) -> None:
    cache = builds('echo "$@" >> "$0.calls"; exec c++ "$@"')
    which, _ = elementwise_work(torch.float32)
    if which == "torch":
        pytest.skip("no C++ compiler")
    assert [f"compiled, {path.stem}" for path in cache.iterdir()] == [which]
    kernels.library.cache_clear()
    assert elementwise_work(torch.bfloat16).name == which
    calls = Path(f"{os.environ['CXX']}.calls").read_text().splitlines()
    assert ["kernels.cpp" in call for call in calls] == [False, True, False]  # what it is, a build, what it is


@pytest.fixture
def kept(builds: Callable[[str], Path]) -> Path:
    """A library in a cache of its own; its path."""
    cache = builds('exec c++ "$@" -O0')  # quickly
    which, why = elementwise_work(torch.float32)
    if which == "torch":
        pytest.skip(why)
    (path,) = cache.iterdir()
    assert (which, why) == (f"compiled, {path.stem}", "faster than torch's")
    assert cache.stat().st_mode & 0o777 == 0o700
    return path


def again() -> tuple[str, str]:
    """What a new process would choose."""
    kernels.library.cache_clear()
    return elementwise_work(torch.float32)


def foreign(path: Path, *, checksum: bool) -> Path:
    """Make `path` a library without kernels that leaves a file when it is loaded; that file."""
    path.unlink()
    mark = path.with_suffix(".ran")
    source = f'#include <fstream>\n__attribute__((constructor)) void f() {{ std::ofstream("{mark}"); }}'
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)], input=source.encode(), check=True)
    if checksum:
        path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())
    return mark


@pytest.mark.parametrize("damage", ["cut", "empty", "a bit", "foreign", "link", "no symbol"])
def test_a_library_that_is_not_the_one_that_was_kept_is_built_again(kept: Path, damage: str) -> None:
    whole, mark = kept.read_bytes(), None
    kept.rename(kept.with_suffix(".loaded"))  # this process has it mapped
    kept.touch()
    if damage in ("cut", "empty"):
        kept.write_bytes(whole[: len(whole) // 2 if damage == "cut" else 0])
    elif damage == "a bit":
        kept.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    elif damage == "link":
        kept.unlink()
        kept.symlink_to(kept.with_suffix(".loaded"))
    else:
        mark = foreign(kept, checksum=damage == "no symbol")
    assert again() == (f"compiled, {kept.stem}", "faster than torch's")
    assert kept.is_file() and not kept.is_symlink()
    content = kept.read_bytes()
    assert hashlib.sha256(content[:-32]).digest() == content[-32:]
    assert mark is None or mark.exists() == (damage == "no symbol")  # what has no checksum is not even loaded
    x = torch.randn(3, 4)
    assert kernels.compiles(x.dtype) and torch.allclose(ops_for(x.dtype).swiglu(x), PLAIN.swiglu(x))


def test_a_directory_in_the_librarys_place_is_left_alone(kept: Path) -> None:
    kept.unlink()
    (kept / "mine").mkdir(parents=True)
    which, why = again()
    assert which == f"compiled, {kept.stem}" and why.startswith("faster than torch's; built for this run alone: ")
    assert [entry.name for entry in kept.iterdir()] == ["mine"] and list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o701])
def test_a_cache_that_others_may_enter_is_not_trusted(kept: Path, mode: int) -> None:
    mark = foreign(kept, checksum=True)
    before = kept.read_bytes()
    kept.parent.chmod(mode)
    which, why = again()
    assert which == f"compiled, {kept.stem}"
    assert (
        why == f"faster than torch's; built for this run alone: {kept.parent} is not a directory of this user's with mode 700"
    )
    assert not mark.exists() and kept.read_bytes() == before


def test_a_cache_of_another_user_is_not_trusted(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = foreign(kept, checksum=True)
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert again()[1].endswith("is not a directory of this user's with mode 700") and not mark.exists()


def test_a_link_to_a_cache_is_not_trusted(kept: Path) -> None:
    mark = foreign(kept, checksum=True)
    kept.parent.rename(kept.parent.with_name("elsewhere"))
    kept.parent.symlink_to("elsewhere")
    assert again()[1].endswith("is not a directory of this user's with mode 700") and not mark.exists()


def test_machines_with_other_cpus_keep_their_own(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "cpuinfo"
    for text in ("model name : other\nflags : fpu avx\n", "CPU part : 0xd40\n", "CPU part : 0xd4f\n"):
        other.write_text(text)
        monkeypatch.setattr(kernel_cache, "CPUINFO", other)
        assert again()[0] != f"compiled, {kept.stem}"
    other.unlink()  # a system without it: told apart by name
    for host in ("one", "two"):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        again()
    assert len(list(kept.parent.iterdir())) == 6
    monkeypatch.undo()


@pytest.mark.parametrize("home", ["/proc", "/proc/none", "/dev/null"])
def test_without_a_home_that_can_be_written_it_is_built_for_the_run(
    kept: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    which, why = again()
    assert which == f"compiled, {kept.stem}" and why.startswith("faster than torch's; built for this run alone: [Errno ")
    assert home in why


def test_a_user_without_a_home(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    which, why = again()
    assert which == f"compiled, {kept.stem}"
    assert why == "faster than torch's; built for this run alone: Could not determine home directory."


def test_where_nothing_can_be_written_torch_does_the_work(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    which, why = again()
    assert which == "torch" and "/proc" in why


def test_two_processes_may_build_at_once(builds: Callable[[str], Path]) -> None:
    """Neither sees half of the other's."""
    cache = builds('exec c++ "$@" -O0')
    text = "import torch; from tests.models import ops_for; print(*ops_for(torch.float32).choices['elementwise work'])"
    started = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in started}
    if any(line.startswith("torch") for line in said):
        pytest.skip("no C++ compiler")
    (path,) = cache.iterdir()
    assert said == {f"compiled, {path.stem} faster than torch's"}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'broken beyond repair' >&2; exit 3", "broken beyond repair"),
        ("exit 3", "exit code 3"),
        ('[ "$1" = --version ] || { echo "error: -march=native: no" >&2; exit 1; }', "error: -march=native: no"),
        ('[ "$1" = --version ] || while [ $# -gt 0 ]; do [ "$1" != -o ] || echo no library > "$2"; shift; done', ".so"),
        (
            '[ "$1" = --version ] || { while [ "$1" != -o ]; do shift; done; echo | c++ -shared -x c++ - -o "$2"; }',
            "no norm_forward_fp32 in the compiled library",
        ),
    ],
)
def test_without_them_torch_does_the_work_and_says_why(builds: Callable[[str], Path], script: str, reason: str) -> None:
    cache = builds(script)
    which, why = elementwise_work(torch.float32)
    assert which == "torch"
    assert reason in why and "CXX" in why
    assert not cache.exists() or not list(cache.glob("*.so"))
    x = torch.tensor([[1.0, 2.0]])
    assert ops_for(torch.float32).swiglu(x).item() == pytest.approx(2 / (1 + torch.tensor(-1.0).exp().item()))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels.library.cache_clear()
    assert "no-such-compiler" in elementwise_work(torch.float32).why
    kernels.library.cache_clear()


def test_other_dtypes_are_torchs() -> None:
    assert elementwise_work(torch.float64) == Choice("torch", "compiled kernels are for fp32 and bf16")
    assert not kernels.compiles(torch.float64)
