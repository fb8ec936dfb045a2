"""What a measurement ran on: processor, memory settings, versions, and the matrix rates that bound every result."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import Turns

SIZE, REPEATS, LIMIT_S = 2048, 8, 20.0  # of the square matrices; seconds after which one dtype has been repeated enough
PACKAGES = ("relax", "torch", "megatron-core", "transformers", "trl", "accelerate", "datasets", "numpy")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "i8mm", "sve")
SETTINGS = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "THP_", "GLIBC_TUNABLES", "LD_PRELOAD", "ATEN_CPU_CAPABILITY")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, instruction sets, memory, load and what in the environment moves allocator and threads."""
    flags = set(_field("/proc/cpuinfo", "flags").split()) | set(_field("/proc/cpuinfo", "Features").split())
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what computes."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def gemm_rates(turns: Turns, threads: int) -> None:
    """A worker's function: replies with {"fp32": TFLOP/s, "bf16": TFLOP/s} of torch's own product, both operands 2,048 squared.

    One operand is transposed, as in a linear layer: where a CPU has no bf16 instructions, torch's other bf16 loops run several
    times slower still.
    """
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.randn(2, SIZE, SIZE).to(dtype)
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < LIMIT_S:
            start = time.perf_counter()
            a @ b.t()
            times.append(time.perf_counter() - start)
        rates[name] = 2 * SIZE**3 / min(times) / 1e12
    turns.reply(rates)


def _field(path: str, name: str) -> str:
    """The first `name : value` line's value in a /proc file; empty where there is none."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
