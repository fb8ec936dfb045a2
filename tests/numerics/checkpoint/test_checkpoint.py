"""What a checkpoint holds and what loading gives, bit for bit."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from relax.backend.checkpoint.loading import CheckpointInfo, load_checkpoint, save_checkpoint
from tests.checkpoints import RUN, TRACKER, found, message, names, save, tensors

pytestmark = pytest.mark.usefixtures("one_process")


def test_layout_and_bits_of_a_checkpoint(tmp_path: Path):
    reference = {"sha256": "ab", "dtype": "bfloat16"}
    save(tmp_path, 50, files={"relax_run.json": RUN, "relax_dpo_reference.json": reference})
    assert names(tmp_path) == ["iter_0000050", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "50"
    path = tmp_path / "iter_0000050"
    assert names(path) == [
        ".metadata",
        "__0_0.distcp",
        "checksums.json",
        "common.pt",
        "metadata.json",
        "relax_dpo_reference.json",
        "relax_run.json",
    ]
    assert json.loads((path / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = torch.load(path / "common.pt", weights_only=True)
    assert common["step"] == 50 and common["scheduler"] == {"num_steps": 50}
    info = found(tmp_path)
    assert info == CheckpointInfo(
        path=path,
        step=50,
        run=RUN,
        reference=reference,
        has_optimizer=True,
        has_rng=True,
        head="lm",
        vocab_rows=None,
        dtype=torch.bfloat16,
        contents=info.contents,
    )
    wanted = tensors(0.0)
    got = load_checkpoint(found(tmp_path), wanted | {"step": 0, "scheduler": {}, "rng": {}})
    exact = torch.arange(12.0).view(3, 4) / 7 + 50
    assert got["model"]["w"].dtype == torch.bfloat16 and torch.equal(got["model"]["w"], exact.bfloat16())
    assert got["optimizer"]["state"]["w"].dtype == torch.float32
    assert torch.equal(got["optimizer"]["state"]["w"], exact)
    assert got["optimizer"]["param_groups"] == [{"lr": 1e-3, "betas": (0.9, 0.999), "step": 50}]
    assert got["step"] == 50 and got["scheduler"] == {"num_steps": 50}
    assert torch.equal(got["rng"]["torch"], torch.get_rng_state())


def test_loading_fills_the_tensors_that_were_given(tmp_path: Path):
    save(tmp_path, 1)
    target = torch.zeros(3, 4)  # wider than the checkpoint's bf16: the value is the same
    got = load_checkpoint(found(tmp_path), {"model": {"w": ShardedTensor.from_rank_offsets("decoder.w", target)}})
    assert list(got) == ["model"]  # nothing that was not asked for
    assert got["model"]["w"].data_ptr() == target.data_ptr()
    assert torch.equal(target, (torch.arange(12.0).view(3, 4) / 7 + 1).bfloat16().float())


def test_megatron_reads_what_is_saved(tmp_path: Path):
    save(tmp_path, 3)
    state = tensors(0.0)
    got = dist_checkpointing.load(state, str(tmp_path / "iter_0000003"))
    assert got["step"] == 3 and torch.equal(got["optimizer"]["state"]["w"], torch.arange(12.0).view(3, 4) / 7 + 3)


def test_padded_vocabulary_rows_may_differ(tmp_path: Path):
    save(tmp_path, 1, vocabulary=ShardedTensor.from_rank_offsets("embedding", torch.arange(1.0, 13).view(6, 2)))

    def load(rows: int) -> torch.Tensor:
        shard = ShardedTensor.from_rank_offsets("embedding", torch.ones(rows, 2), allow_shape_mismatch=True)
        return load_checkpoint(found(tmp_path), {"vocabulary": shard})["vocabulary"]

    assert load(6).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert load(8).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [0, 0], [0, 0]]
    assert load(5).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    fixed = {"vocabulary": ShardedTensor.from_rank_offsets("embedding", torch.ones(8, 2))}
    assert message(load_checkpoint, found(tmp_path), fixed) == (
        f"--load {tmp_path}/iter_0000001 holds embedding in shape [6, 2], but this model needs [8, 2]: give the checkpoint of "
        "this model"
    )


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path):
    state = {"model": tensors(1)["model"], "step": 1}
    save_checkpoint(tmp_path, step=1, state=state, files={"relax_run.json": RUN})
    info = found(tmp_path)
    assert not info.has_optimizer and not info.has_rng
    path = tmp_path / "iter_0000001"
    assert message(load_checkpoint, info, tensors(0)) == (
        f"--load {path} lacks 1 of the tensors asked for: optimizer.state.param.decoder.w; --no-load-optim goes on without it"
    )
    assert message(load_checkpoint, info, {"step": 0, "rng": {}, "scheduler": {}}) == (
        f"--load {path} lacks what was asked for: rng, scheduler"
    )
    more = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(1)) for name in "abcd"}
    assert message(load_checkpoint, info, more) == f"--load {path} lacks 4 of the tensors asked for: a, b, c, ..."


@pytest.mark.parametrize(
    ("keys", "run", "head"),
    [
        ({"score.weight": (1, 4)}, {}, "scalar"),
        ({"output_layer.weight": (8, 4)}, {}, "lm"),
        ({"output_layer.weight": (1, 4)}, {}, "value"),
        ({"value_head.weight": (1, 4)}, {"head": "lm"}, "value"),
        ({"decoder.w": (4, 4)}, {"head": "lm"}, "lm"),
        ({"decoder.w": (4, 4)}, {"head": "scalar"}, None),
        ({"decoder.w": (4, 4), "optimizer.state.param.score.weight": (1, 4)}, {}, None),
    ],
)
def test_the_head_is_read_from_the_tensors(tmp_path: Path, keys: dict[str, tuple], run: dict[str, str], head: str | None):
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(size)) for key, size in keys.items()}
    save_checkpoint(tmp_path, step=1, state=state, files={"relax_run.json": run} if run else {})
    assert found(tmp_path).head == head


def test_a_critics_head_is_no_output_layer(tmp_path: Path):
    critic = {"output": ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(1, 4))}
    save_checkpoint(tmp_path, step=1, state=critic, files={})
    output = ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(8, 4), allow_shape_mismatch=True)
    assert message(load_checkpoint, found(tmp_path), {"output": output}) == (
        f"--load {tmp_path}/iter_0000001 holds output_layer.weight in shape [1, 4], but this model needs [8, 4]: give the "
        "checkpoint of this model"
    )


def test_sharded_state_is_tensors_and_plain_values_load_with_weights_only(tmp_path: Path):
    def sharded(data: Any) -> dict[str, Any]:
        return tensors(1) | {"extra": ShardedObject("layer._extra_state", data, (1,), (0,))}

    save_checkpoint(tmp_path, step=1, state=sharded(None), files={"relax_run.json": RUN})
    assert (
        "layer._extra_state/shard_0_1"
        not in dcp.FileSystemReader(tmp_path / "iter_0000001").read_metadata().state_dict_metadata
    )
    assert load_checkpoint(found(tmp_path), sharded(None))["extra"] is None
    with pytest.raises(ValueError, match="^sharded object layer._extra_state: sharded state must be tensors"):
        save_checkpoint(tmp_path, step=2, state=sharded({"scale": 1}), files={})
    with pytest.raises(ValueError, match="^a value beside the sharded tensors does not load with weights only$"):
        save(tmp_path, 3, options=argparse.Namespace(lr=1))
    assert found(tmp_path).step == 1
