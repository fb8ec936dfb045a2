"""Small checkpoints to save, find and spoil, for tests."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from relax.backend.checkpoint.loading import CheckpointInfo, find_checkpoint, save_checkpoint
from relax.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RUN = {"loss_type": "dpo", "head": "lm"}
REFUSAL = "a checkpoint needs no such thing, and loading it could run code; relax refuses to read it"


def tensors(value: float, **more: torch.Tensor) -> dict[str, Any]:
    """A model of one bf16 matrix [3, 4] and its fp32 master weight."""
    weight = torch.arange(12.0).view(3, 4) / 7 + value
    return {
        "model": {"w": ShardedTensor.from_rank_offsets("decoder.w", weight.bfloat16())},
        "optimizer": {
            "state": {"w": ShardedTensor.from_rank_offsets("optimizer.state.param.decoder.w", weight)},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "step": int(value)}],
        },
    } | {name: ShardedTensor.from_rank_offsets(name, data) for name, data in more.items()}


def save(directory: Path, step: int, *, keep: int | None = None, files: dict[str, Any] | None = None, **more: Any) -> None:
    state = tensors(step) | {"step": step, "scheduler": {"num_steps": step}, "rng": {"torch": torch.get_rng_state()}}
    files = {"relax_run.json": RUN} if files is None else files
    save_checkpoint(directory, step=step, state=state | more, files=files, keep=keep)


def find(directory: Path, step: int | None = None, said: list[str] | None = None) -> CheckpointInfo | None:
    return find_checkpoint(directory, step=step, flag="--load", say=(said if said is not None else []).append)


def found(directory: Path, step: int | None = None) -> CheckpointInfo:
    info = find(directory, step)
    assert info is not None
    return info


def message(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value)


def forge(file: Path, content: bytes) -> None:
    """Change a file of a checkpoint as its maker could: no checksum tells."""
    file.write_bytes(content)
    (file.parent / "checksums.json").unlink(missing_ok=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow past `size` bytes: a full disk, for this process."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
