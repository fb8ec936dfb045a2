"""kernels.cpp, compiled for this machine's CPU by its C++ compiler and kept for later runs (`kernel_cache`).

A step's elementwise work is bound by memory, which torch's operations pass over once each. torch.utils.cpp_extension would
build the library, too, but it needs ninja, waits for ever for the lock file that a killed process leaves, and gives one CPU's
instructions to another that shares the home directory.

Invariant: a kernel gets tensors of the dtypes that it declares: what the source says is read from there.
"""

import ctypes
import functools
import platform
import re
from pathlib import Path
from typing import Any

import torch

from relax.backend.ops.cpu.kernel_cache import BuildFailed, Library, load_library

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Without the two -fno- flags a compiler may not turn square roots and rounding into vector code.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "int": ctypes.c_int}
SUFFIX = {torch.float32: "_fp32", torch.bfloat16: "_bf16"}


def compiles(dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of `dtype`."""
    return dtype in SUFFIX and not isinstance(library(), str)


def run(kernel: str, dtype: torch.dtype, *arguments: torch.Tensor | int | float) -> None:
    """Run a kernel for `dtype`; it takes the arguments in kernels.cpp but the last, dense tensors for pointers."""
    built = library()
    assert isinstance(built, Library), built
    function, pointed = _function(built.loaded, kernel, dtype)
    converted = []
    for kind, argument in zip(pointed, arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            assert argument.dtype == kind and argument.is_cpu, f"{kernel}: {argument.dtype} on {argument.device}, not {kind}"
            argument = argument.data_ptr()
        converted.append(argument)
    function(*converted, torch.get_num_threads())


@functools.cache
def _function(loaded: ctypes.CDLL, kernel: str, dtype: torch.dtype) -> tuple[Any, tuple[torch.dtype | None, ...]]:
    """A kernel and, of each argument but the last, the dtype that it points to, None for a number."""
    function = getattr(loaded, kernel + SUFFIX[dtype])
    declared = [re.sub(r"^const ", "", argument).split()[0] for argument in _declarations()[kernel].split(", ")]
    function.argtypes = [ctypes.c_void_p if kind.endswith("*") else _NUMBERS[kind] for kind in declared]
    pointed = {"T*": dtype, "float*": torch.float32, "int64_t*": torch.int64}
    return function, tuple(pointed.get(kind) for kind in declared[:-1])


def _declarations() -> dict[str, str]:
    """The arguments of each kernel, as the source declares them."""
    found = re.findall(r"^KERNEL\((\w+)\)\(([^)]+)\)", _SOURCE.read_text(), re.MULTILINE)
    return {name: " ".join(arguments.split()) for name, arguments in found}


@functools.cache
def library() -> Library | str:
    """The library, or why there is none."""
    flags = [*_FLAGS, *([_WIDE] if platform.machine() == "x86_64" else [])]
    symbols = [name + suffix for name in _declarations() for suffix in SUFFIX.values()]
    try:
        return load_library(_SOURCE, flags=flags, symbols=symbols)
    except BuildFailed as failed:
        return f"slower than compiled kernels, which need a C++ compiler; {failed}"
