"""Process groups: who holds which part of the model and of the data, and how the ranks agree."""

import datetime
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from relax.backend.device import collectives_backend, on_device
from relax.errors import UserError

T = TypeVar("T")

LONGEST_WORK = datetime.timedelta(days=1)  # of one rank, while the others wait in `agree`
_waiting: dist.ProcessGroup | None = None  # all ranks, on gloo: its timeout is that, whatever the other groups' is
_meeting: dist.ProcessGroup | None = None  # the same with the run's own timeout, for work that takes a moment


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the parallel dimensions; data parallelism takes what they leave of the world size."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_virtual_stage: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False

    @property
    def row_multiple(self) -> int:
        """What the rows of a pack divide by: zig-zag halves over context, and sequence-parallel slices of those."""
        return (2 * self.context if self.context > 1 else 1) * (self.tensor if self.sequence else 1)

    def virtual_stages(self, num_layers: int) -> int | None:
        """Model chunks per pipeline rank under the interleaved schedule; None without it."""
        if self.layers_per_virtual_stage is None:
            return None
        return num_layers // self.pipeline // self.layers_per_virtual_stage


def initialize(
    config: ParallelConfig,
    *,
    device: torch.device,
    seed: int,
    virtual_stages: int | None = None,
    timeout_minutes: float = 10,
) -> None:
    """Join the run (torchrun's environment variables, or a world of one) and build megatron-core's groups; seed everything.

    timeout_minutes: of collective operations. Tokenizing and exporting on one rank may take longer: see `agree`.
    """
    global _waiting, _meeting
    if not dist.is_initialized():
        backend = collectives_backend(device)
        timeout = datetime.timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.TCPStore("127.0.0.1", _free_port(), 1, is_master=True)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        _waiting = dist.new_group(backend="gloo", timeout=timeout)  # that of connecting
        dist.distributed_c10d._set_pg_timeout(LONGEST_WORK, _waiting)
        _meeting = dist.new_group(backend="gloo", timeout=timeout)
    with on_device(device):
        parallel_state.initialize_model_parallel(
            config.tensor,
            config.pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.expert_tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_minutes,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def shutdown() -> None:
    """Leave the run; safe to call twice."""
    global _waiting, _meeting
    if dist.is_initialized():
        _waiting = _meeting = None
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def main_rank_first(work: Callable[[bool], T]) -> T:
    """Run `work(True)` on each node's first rank, then `work(False)` on the others, which find its files.

    One rank's UserError is everyone's.
    """
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    result: list[T] = []

    def attempt() -> None:
        result.append(work(first))

    agree(attempt if first else None)
    agree(None if first else attempt)
    return result[0]


def agree(work: Callable[[], None] | None, *, brief: bool = False) -> None:
    """Run `work` where there is any; if any rank met a UserError, raise the first one on all of them.

    The others wait for up to LONGEST_WORK, or with `brief` for the run's timeout; they learn at once of a rank that died.
    """
    problem = None
    try:
        if work is not None:
            work()
    except UserError as error:
        problem = str(error)
    for text in gather(problem, brief=brief):
        if text is not None:
            raise UserError(text)


def gather(value: T, *, brief: bool = False) -> list[T]:
    """What each rank gives, by rank, on all of them; `brief` as in `agree`. No GPU takes part."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_meeting if brief else _waiting)
    return cast(list[T], values)


def all_come(*, within_seconds: float) -> bool:
    """Whether every rank comes here in that time. The ranks cannot wait for each other again where one does not."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        try:
            dist.monitored_barrier(group=_waiting, timeout=datetime.timedelta(seconds=within_seconds))
        except RuntimeError:
            return False
    return True


def from_main_rank(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, which alone runs it, on every rank; its UserError is everyone's."""
    result: list[T | None] = [None]

    def attempt() -> None:
        result[0] = work()

    if not dist.is_initialized() or dist.get_world_size() == 1:
        attempt()
    else:
        agree(attempt if dist.get_rank() == 0 else None)
        dist.broadcast_object_list(result, src=0, group=_waiting)
    return cast(T, result[0])


def any_rank(flag: int, device: torch.device) -> int:
    """The largest `flag` over all ranks."""
    value = torch.tensor([flag], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value.item())
