"""kernels.cpp, compiled for this machine's CPU by its C++ compiler and kept for later runs.

A step's elementwise work is bound by memory, which torch's operations pass over once each. Where there is no compiler, on
another device and in other dtypes callers do the same by torch's operations; `choose_kernels` says which it is, and why.

Invariant: a library is used with the source, the compiler and the CPU that it was built for.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

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
    return None if isinstance(library, str) else functools.partial(_call, library[name + _SUFFIX[like.dtype]])


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
    return ("torch", library) if isinstance(library, str) else (f"compiled, {Path(library._name).stem}", "faster than torch's")


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    compiler = os.environ.get("CXX", "c++")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        flags = [*_FLAGS, *([_WIDE] if platform.machine() == "x86_64" else [])]
        built_for = [_SOURCE.read_bytes(), compiler.encode(), version, " ".join(flags).encode(), _cpu()]
        name = hashlib.sha256(b"\0".join(built_for)).hexdigest()[:16]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"
        path = cache / f"{name}.so"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                built = Path(directory) / path.name
                command = [compiler, *flags, "-o", str(built), str(_SOURCE)]
                subprocess.run(command, capture_output=True, check=True, timeout=600)
                ctypes.CDLL(str(built))
                built.replace(path)  # what loads, or nothing, whoever else builds it
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: no home directory
        reason = str(error)
    return f"slower than compiled kernels, which need a C++ compiler; {compiler} (CXX): {reason}"


def _cpu() -> bytes:
    """What tells CPUs with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
