"""Checkpoints and several ranks: what two save, one loads, and the reverse; what fails on one rank ends on both.

The test runs this file under torchrun as two ranks; each writes what it saw as JSON.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from relax.backend import parallel
from relax.backend.checkpoint import find as checkpoint_find
from relax.backend.checkpoint.loading import CheckpointStore, find_checkpoint, load_checkpoint, save_checkpoint
from relax.backend.checkpoint.state import load_training_state, training_state
from relax.backend.device import on_device
from relax.backend.engine import Engine
from relax.backend.optimizer import OptimizerOptions
from relax.backend.parallel import all_come
from relax.errors import UserError
from relax.objectives import OBJECTIVES

pytestmark = pytest.mark.distributed
CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
FILES = {"relax_run.json": {"head": "lm"}}
OPTIONS = OptimizerOptions(
    lr=1e-2,
    min_lr=0.0,
    decay_style="constant",
    warmup_steps=0,
    total_steps=10,
    weight_decay=0.0,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    clip_grad=0.0,  # a norm summed in another order would move the last bit
    distributed=True,
    overlap=False,
)


def config() -> Any:
    import transformers

    return transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


def engine(*, seed: int) -> Engine:
    """A model of random weights after one optimizer step, the same on every rank and data-parallel size."""
    made = Engine(config(), objective=OBJECTIVES["dpo"](), device=CPU, dtype=torch.bfloat16, parallel=parallel.ParallelConfig())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.chunks[0].parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    made.prepare_training(OPTIONS)
    with on_device(CPU):
        for p in made.wrapped[0].parameters():
            p.main_grad.copy_(torch.randn(p.shape, generator=generator))
        made.optimizer.step()
        made.scheduler.step(1)
    return made


def full_state(made: Engine) -> list[tuple[str, torch.Tensor]]:
    """The model's tensors, master weights and moments, layer by layer."""
    state = training_state(made, step=5, optimizer=True, rng=False, loading=False)
    shards = [value for value in nested_values(state) if isinstance(value, (ShardedTensor, ShardedTensorFactory))]
    return [(shard.key, shard.data) for shard in shards]


def halves(matrix: torch.Tensor | None = None, *, key: str = "w") -> ShardedTensor:
    """Rows of a [4, 3] matrix, split over the ranks as tensor parallelism does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(4, 3) if matrix is None else matrix
    return ShardedTensor.from_rank_offsets(key, rows.chunk(size)[rank].clone(), (0, rank, size))


def copies(vector: torch.Tensor) -> ShardedTensor:
    """The same tensor on every rank, as data parallelism has it."""
    return ShardedTensor.from_rank_offsets("copied", vector, replica_id=dist.get_rank())


def message(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except UserError as error:
        return str(error)
    return "no error"


def find(directory: Path) -> Any:
    return find_checkpoint(directory, step=None, flag="--load")


def worker(root: Path) -> dict[str, Any]:
    """What one of two ranks does and sees."""
    seen: dict[str, Any] = {}
    rank = dist.get_rank()
    got = load_checkpoint(find(root / "one"), {"w": halves(), "copied": copies(torch.zeros(2)), "step": 0})
    seen["loaded"] = [got["w"].tolist(), got["copied"].tolist(), got["step"]]
    matrix = torch.arange(12.0).view(4, 3) + 100
    state = {"w": halves(matrix), "copied": copies(torch.tensor([3.0, 4.0])), "step": 2}
    save_checkpoint(root / "two", step=2, state=state, files=FILES)

    made = engine(seed=1)
    assert parallel_state.get_data_parallel_world_size() == 2
    state = training_state(made, step=5, optimizer=True, rng=False, loading=False)
    save_checkpoint(root / "engine", step=5, state=state, files=FILES)

    wanted = {"w": halves(), "mine": halves(key="absent")} if rank == 1 else {"w": halves()}
    seen["missing"] = message(load_checkpoint, find(root / "two"), wanted)

    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, former[1]))
    big = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(5000), (0, rank, 2))}
    seen["full"] = message(save_checkpoint, root / "two", step=3, state=big, files=FILES)
    resource.setrlimit(resource.RLIMIT_FSIZE, former)

    (root / "file").touch()
    seen["unwritable"] = message(save_checkpoint, root / "file" / "run", step=3, state={"w": halves()}, files=FILES)

    store = CheckpointStore(root / "background")
    store.save_checkpoint(step=1, state={"w": halves(matrix), "step": 1}, files=FILES, async_save=True)
    while not store.finish_pending(blocking=False):
        pass
    got = load_checkpoint(find(root / "background"), {"w": halves(), "step": 0})
    seen["background"] = [got["w"].tolist(), got["step"]]

    if rank == 1:  # only rank 0 looks
        checkpoint_find._find = None
    info = find(root / "two")
    seen["found"] = [str(info.path), info.step, info.run, len(info.contents.metadata.storage_data)]
    seen["none"] = find(root / "absent")
    seen["nowhere"] = message(find, root / "file")

    if rank == 0:  # which reads the other file
        file = root / "background" / "iter_0000001" / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    dist.barrier()
    seen["damaged"] = message(load_checkpoint, find(root / "background"), {"w": halves(), "step": 0})

    seen["all come"] = all_come(within_seconds=60)
    if rank == 0:
        seen["one comes"] = all_come(within_seconds=0.5)  # the last of all: the group is of no use behind it
    return seen


@pytest.mark.usefixtures("on_cpu")
def test_two_ranks(tmp_path: Path):
    matrix = torch.arange(12.0).view(4, 3)
    state = {"w": halves(matrix), "copied": copies(torch.tensor([1.0, 2.0])), "step": 1}
    save_checkpoint(tmp_path / "one", step=1, state=state, files=FILES)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))

    # One rank saved, two load: each gets its rows and a whole copy of what is not split.
    assert first.pop("loaded") == [matrix[:2].tolist(), [1.0, 2.0], 1]
    assert second.pop("loaded") == [matrix[2:].tolist(), [1.0, 2.0], 1]
    # Two saved, one loads.
    got = load_checkpoint(find(tmp_path / "two"), {"w": halves(), "copied": copies(torch.zeros(2)), "step": 0})
    assert got["w"].tolist() == (matrix + 100).tolist() and got["copied"].tolist() == [3.0, 4.0] and got["step"] == 2
    # A background save of two.
    assert [first.pop("background"), second.pop("background")] == [
        [(matrix[:2] + 100).tolist(), 1],
        [(matrix[2:] + 100).tolist(), 1],
    ]
    # What rank 0 finds is what all find.
    assert [first.pop("found"), second.pop("found")] == [[f"{tmp_path}/two/iter_0000002", 2, {"head": "lm"}, 3]] * 2
    assert first.pop("none") is None is second.pop("none")
    assert [first.pop("all come"), second.pop("all come"), first.pop("one comes")] == [True, True, False]
    # What fails on one rank is the same message on both.
    refused = {
        "nowhere": f"--load {tmp_path}/file is a file; give a directory of checkpoints",
        "damaged": (
            f"--load {tmp_path}/background/iter_0000001 is damaged: its file __1_0.distcp does not hold what was saved (the "
            "checksum of w differs); no complete checkpoint is before it: restore the file"
        ),
        "missing": f"--load {tmp_path}/two/iter_0000002 lacks 1 of the tensors asked for: absent",
        "full": (
            f"--save {tmp_path}/two: iter_0000003 cannot be saved: File too large; the former checkpoint, "
            "iter_0000002, is whole. Make room or make the directory writable, then run the same command again"
        ),
        "unwritable": (
            f"--save {tmp_path}/file/run: iter_0000003 cannot be saved: Not a directory at {tmp_path}/file/run; no "
            "checkpoint is there yet. Make room or make the directory writable, then run the same command again"
        ),
    }
    assert [first, second] == [refused, refused]
    assert sorted(os.listdir(tmp_path / "two")) == ["iter_0000002", "latest_checkpointed_iteration.txt"]

    # Model and distributed optimizer of two data-parallel ranks, in a world of one: the same bits as there.
    expected, other = full_state(engine(seed=1)), engine(seed=2)
    asked = training_state(other, step=0, optimizer=True, rng=False, loading=True)
    load_training_state(other, load_checkpoint(find(tmp_path / "engine"), asked))
    loaded = full_state(other)
    assert len(loaded) == 4 * len(list(other.chunks[0].parameters()))
    for (key, value), (same_key, same) in zip(loaded, expected, strict=True):
        assert key == same_key and value.dtype == same.dtype and torch.equal(value, same), key


if __name__ == "__main__":
    parallel.initialize(parallel.ParallelConfig(), device=CPU, seed=0)
    with on_device(CPU):
        result = worker(Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    parallel.shutdown()
