"""The device seam: megatron-core, unmodified, on a CPU.

megatron-core names CUDA inside long constructors (DDP buffers, optimizers, schedules, MoE routing) where neither flags nor
subclasses reach. On a CPU run `on_device` reads those names as CPU while a backend call runs and puts everything back
afterwards; on a CUDA run it does nothing. Everything it touches is in this file.

The same seam puts a CPU's operators in the place of torch's and apex's that megatron-core calls by name.
"""

import contextlib
import ctypes
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from relax.backend.ops.cpu.products import add_weight_gradient, multiply_on_cpu, widened
from relax.backend.ops.gradients import into_buffer
from relax.errors import UserError

Method = TypeVar("Method", bound=Callable[..., Any])

_CPU = torch.device("cpu")


def select_device(kind: str) -> torch.device:
    """The device of this process for `--device auto|cpu|cuda`; CUDA processes take the GPU of their LOCAL_RANK."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        _keep_freed_memory()
        return _CPU
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device; use --device cpu, or install a CUDA build of torch")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK {local_rank} has no GPU: {torch.cuda.device_count()} are visible; start fewer processes per node"
        )
    torch.cuda.set_device(local_rank)
    _repeat_exactly()
    return torch.device("cuda", local_rank)


def _repeat_exactly() -> None:
    """Choose CUDA's deterministic kernels: a run that resumes must repeat the bits, and atomic additions in backward do not."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product is made
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch swaps the module's class


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse freed tensors instead of returning them to the system: a step frees and takes gigabytes, and
    fresh pages took a tenth of its time. The peak is the same."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc alone
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run megatron-core code on `device`. Re-entrant; inert on CUDA."""
    if device.type == "cuda" or _CudaAsCpu.depth:
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in _cpu_attributes():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_CudaAsCpu())
        yield


def runs_on_device(method: Method) -> Method:
    """Decorate a method of an object with a `.device`: its body runs inside `on_device`."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with on_device(self.device):
            return method(self, *args, **kwargs)

    return cast(Method, wrapper)


class _CudaAsCpu(TorchFunctionMode):
    """`device="cuda"` becomes CPU, `.cuda()` the tensor itself, `pin_memory` nothing; `.type()` answers as megatron expects."""

    depth = 0

    def __enter__(self) -> "_CudaAsCpu":
        type(self).depth += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        type(self).depth -= 1
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not kwargs and func not in _PLACED:  # nearly all, once a model stands
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return name if name.startswith("torch.cuda") else name.replace("torch.", "torch.cuda.", 1)
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


_PLACED = {torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to}


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """A CUDA stream or event where there is none: everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.nothing = lambda *args, **kwargs: None

    def __getattr__(self, name: str) -> Any:
        return self.nothing

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> "_Stream":
        return self


class _GradientAccumulation:
    """What megatron takes from apex: a linear layer's weight gradient, added to its fp32 buffer by the product itself."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        add_weight_gradient(main_grad, grad, x)


@functools.cache
def _cpu_attributes() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value on a CPU) of every name that megatron-core reads."""
    from megatron.core.tensor_parallel import layers, mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _Stream()
    layers.fused_weight_gradient_mlp_cuda = getattr(layers, "fused_weight_gradient_mlp_cuda", None)  # absent without apex

    # Functions of their own each: torch's compiler, which its optimizers load, refuses one function under two names.
    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def no_state() -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)

    # Dropout would draw from torch's CPU generator, which tensor_parallel.checkpoint saves and restores anyway.
    attributes = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", nothing()),
        (torch.cuda, "empty_cache", nothing()),
        (torch.cuda, "manual_seed", nothing()),
        (torch.cuda, "set_device", nothing()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda *args: stream),
        (torch.cuda, "default_stream", lambda *args: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "get_rng_state", no_state()),
        (torch.cuda.random, "get_rng_state", no_state()),
        (mcore_random, "_get_cuda_rng_state", no_state()),
        (mcore_random, "_set_cuda_rng_state", nothing()),
        (layers, "_grad_accum_fusion_available", True),
        (layers, "fused_weight_gradient_mlp_cuda", _GradientAccumulation),
        # gloo takes all-to-all splits as numbers only; megatron turns them into numbers for CUDA tensors alone.
        (
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            lambda t, as_numpy=False, record_stream=False: t.numpy() if as_numpy and torch.is_tensor(t) else t,
        ),
        (mappings, "_gather_along_first_dim", _gather_of_any_size(mappings._gather_along_first_dim)),
        (mappings, "_reduce_scatter_along_first_dim", _reduce_scatter_of_any_size(mappings._reduce_scatter_along_first_dim)),
    ]
    # Attributes, not the mode above: no mode reaches into a Python backward.
    for owner, name in ((torch, "matmul"), (torch.Tensor, "matmul"), (torch, "mm"), (torch.nn.functional, "linear")):
        attributes.append((owner, name, multiply_on_cpu(getattr(owner, name))))
    attributes.append((torch.nn.functional, "embedding", into_buffer(torch.nn.functional.embedding)))
    return [(owner, name, value) for owner, name, value in attributes if hasattr(owner, name)]


def _gather_of_any_size(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """megatron's all-gather along axis 0, where gloo takes pieces of one size only."""

    def gathered(piece: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return gather(piece, group, sizes, *rest)
        padded = piece.new_zeros(max(sizes), *piece.shape[1:])
        padded[: piece.size(0)] = piece
        pieces = gather(padded, group).chunk(group.size())
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    return gathered


def _reduce_scatter_of_any_size(reduce_scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """megatron's reduce-scatter along axis 0, where gloo gives pieces of one size only."""

    def scattered(whole: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return reduce_scatter(whole, group, sizes, *rest)
        whole = whole.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole.split(sizes)[group.rank()]

    return scattered


def is_main_rank() -> bool:
    """Whether this process speaks for the run (rank 0, or the only process), also before it has joined it."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0


def fuses_weight_gradients(device: torch.device) -> bool:
    """Whether megatron's linear layers can add a weight's gradient to its buffer: the seam's work; on a GPU it needs apex."""
    return device.type == "cpu"


def collectives_backend(device: torch.device) -> str:
    """torch.distributed's backend for tensors of the device."""
    return "nccl" if device.type == "cuda" else "gloo"


def wait_until_sent(device: torch.device) -> None:
    """Wait for what was sent: NCCL queues sends, and stops a run whose last one takes long."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def describe(device: torch.device) -> str:
    """What of the device a number may depend on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held: allocated on the GPU, or resident on a CPU; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# Dense bf16 TFLOP/s from the vendors' data sheets; by the start of the device's name.
_BF16_PEAKS = {"NVIDIA A100": 312.0, "NVIDIA H100": 989.0, "NVIDIA H200": 989.0, "NVIDIA B200": 2250.0}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """What `perf/mfu` divides by where --peak-tflops does not say: the data sheet's peak of a known GPU in bf16, else the rate
    measured here on square matrices, of 1,024 on a CPU and 4,096 on a GPU; TFLOP/s."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for start, peak in _BF16_PEAKS.items():
            if name.startswith(start):
                return peak
    size = 1024 if device.type == "cpu" else 4096
    a = torch.ones(size, size, dtype=dtype, device=device)
    a = widened(a) if device.type == "cpu" else a
    best = float("inf")
    for _ in range(3):
        start_time = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start_time)
    return 2 * size**3 / best / 1e12
