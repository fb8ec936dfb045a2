"""kernels.cpp, compiled for this machine's CPU by its C++ compiler and kept for later runs (`kernel_cache`).

A step's elementwise work is bound by memory, which torch's operations pass over once each. torch.utils.cpp_extension would
build the library, too, but it needs ninja, waits for ever for the lock file that a killed process leaves, and gives one CPU's
instructions to another that shares the home directory.
"""

import ctypes
import functools
import platform
import re
from pathlib import Path

import torch

from relax.backend.ops.cpu.kernel_cache import BuildFailed, Library, load_library

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Without the two -fno- flags a compiler may not turn square roots and rounding into vector code.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
SUFFIX = {torch.float32: "_fp32", torch.bfloat16: "_bf16"}


def compiles(dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of `dtype`."""
    return dtype in SUFFIX and not isinstance(library(), str)


def run(kernel: str, dtype: torch.dtype, *arguments: torch.Tensor | int | float) -> None:
    """Run a kernel for `dtype`; it takes the arguments in kernels.cpp but the last, dense tensors for pointers."""
    built = library()
    assert isinstance(built, Library), built
    getattr(built.loaded, kernel + SUFFIX[dtype])(*map(_converted, arguments), torch.get_num_threads())


def _converted(argument: torch.Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


@functools.cache
def library() -> Library | str:
    """The library, or why there is none."""
    flags = [*_FLAGS, *([_WIDE] if platform.machine() == "x86_64" else [])]
    names = re.findall(r"^KERNEL\((\w+)\)", _SOURCE.read_text(), re.MULTILINE)
    try:
        return load_library(_SOURCE, flags=flags, symbols=[name + suffix for name in names for suffix in SUFFIX.values()])
    except BuildFailed as failed:
        return f"slower than compiled kernels, which need a C++ compiler; {failed}"
