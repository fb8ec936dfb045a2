"""kernels.cpp, compiled for this machine's CPU by its C++ compiler and kept for later runs (`kernel_cache`).

A step's elementwise work is bound by memory, which torch's operations pass over once each. Where there is no compiler, on
another device and in other dtypes callers do the same by torch's operations; `choose_kernels` says which it is, and why.
"""

import ctypes
import functools
import platform
import re
from collections.abc import Callable
from pathlib import Path

import torch

from relax.backend.kernel_cache import BuildFailed, Library, load_library

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Without the two -fno- flags a compiler may not turn square roots and rounding into vector code.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_WIDE = "-mprefer-vector-width=512"
_SUFFIX = {torch.float32: "_fp32", torch.bfloat16: "_bf16"}


def kernel(name: str, like: torch.Tensor) -> Callable[..., None] | None:
    """The kernel `name` for tensors of this device and dtype, None where torch's operations are to be used.

    It takes the arguments in kernels.cpp but the last, dense tensors for pointers.
    """
    if like.device.type != "cpu" or like.dtype not in _SUFFIX:
        return None
    library = _library()
    return None if isinstance(library, str) else functools.partial(_call, library.loaded[name + _SUFFIX[like.dtype]])


def _call(function: Callable[..., None], *arguments: torch.Tensor | int | float) -> None:
    function(*map(_converted, arguments), torch.get_num_threads())


def _converted(argument: torch.Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """What does the elementwise work for `device` and `dtype`, "torch" or "compiled" and which build of it, and why."""
    if device.type != "cpu" or dtype not in _SUFFIX:
        return "torch", "compiled kernels are for a CPU, bf16 and fp32"
    library = _library()
    if isinstance(library, str):
        return "torch", library
    kept = f"; built for this run alone: {library.unkept}" if library.unkept else ""
    return f"compiled, {library.key}", f"faster than torch's{kept}"


@functools.cache
def _library() -> Library | str:
    """The library, or why there is none."""
    flags = [*_FLAGS, *([_WIDE] if platform.machine() == "x86_64" else [])]
    names = re.findall(r"^KERNEL\((\w+)\)", _SOURCE.read_text(), re.MULTILINE)
    try:
        return load_library(_SOURCE, flags=flags, symbols=[name + suffix for name in names for suffix in _SUFFIX.values()])
    except BuildFailed as failed:
        return f"slower than compiled kernels, which need a C++ compiler; {failed}"
