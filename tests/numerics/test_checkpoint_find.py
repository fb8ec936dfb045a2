"""Which checkpoint is taken, and every message where none can be."""

import argparse
import os
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from relax.backend.checkpoint import CheckpointInfo, load_checkpoint
from tests.checkpoints import TRACKER, find, found, message, save

pytestmark = pytest.mark.usefixtures("one_process")


def test_nothing_there_is_a_new_run_and_says_so(tmp_path: Path):
    said: list[str] = []
    empty, unfinished = tmp_path / "empty", tmp_path / "unfinished"
    empty.mkdir()
    (empty / ".nfs01").touch()
    (unfinished / ".iter_0000010.tmp").mkdir(parents=True)
    (unfinished / "iter_0000005").mkdir()  # as megatron leaves one
    assert [find(path, said=said) for path in (tmp_path / "absent", empty, unfinished)] == [None, None, None]
    assert said == [
        f"--load {tmp_path}/absent: no checkpoint yet, the directory does not exist",
        f"--load {tmp_path}/empty: no checkpoint yet, the directory is empty",
        f"--load {tmp_path}/unfinished: no complete checkpoint, only unfinished saves (.iter_0000010.tmp, iter_0000005)",
    ]


def test_what_is_no_directory_of_checkpoints_is_refused(tmp_path: Path):
    file, model = tmp_path / "file", tmp_path / "model"
    file.touch()
    model.mkdir()
    for name in ("config.json", "merges.txt", "model.safetensors", "tokenizer.json"):
        (model / name).touch()
    assert message(find, file) == f"--load {file} is a file; give a directory of checkpoints"
    assert message(find, model) == (
        f"--load {model} is not a directory of checkpoints (iter_*): it holds config.json, merges.txt, model.safetensors, ..."
    )


def test_the_trackers_iteration_is_taken_else_the_newest_whole_one(tmp_path: Path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    said: list[str] = []

    def taken() -> int:
        info = find(tmp_path, said=said)
        assert info is not None
        return info.step

    (tmp_path / TRACKER).write_text("20\n")
    assert taken() == 20 and said == []
    where = f"--load {tmp_path}: "
    for content, problem in (
        ("40", f"{TRACKER} names step 40, but iter_0000040 is not there"),
        ("soon", f"{TRACKER} holds 'soon' instead of a step"),
        ("", f"{TRACKER} holds '' instead of a step"),
        (None, f"{TRACKER} is missing"),
    ):
        (tmp_path / TRACKER).unlink() if content is None else (tmp_path / TRACKER).write_text(content)
        assert taken() == 30
        assert said == [f"{where}{problem}; taking iter_0000030, the newest complete checkpoint"]
        said.clear()
    (tmp_path / TRACKER).write_text("30")
    (tmp_path / "iter_0000030" / "__0_0.distcp").unlink()
    os.truncate(tmp_path / "iter_0000020" / "__0_0.distcp", 100)
    assert taken() == 10
    size = (tmp_path / "iter_0000010" / "__0_0.distcp").stat().st_size
    assert said == [
        f"{where}iter_0000030 cannot be used: its file __0_0.distcp is missing; iter_0000020 cannot be used: its file "
        f"__0_0.distcp has 100 bytes of {size}; taking iter_0000010, the newest complete checkpoint"
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metadata.json", None, "it has no metadata.json"),
        ("metadata.json", b"{", "its metadata.json cannot be read (Expecting property name"),
        (".metadata", None, "it has no .metadata"),
        (".metadata", b"\x80\x04", "its .metadata cannot be read (EOFError: Ran out of input)"),
        ("common.pt", None, "it has no common.pt"),
        ("common.pt", b"PK", "its common.pt cannot be read (UnpicklingError)"),
        ("common.pt", b"", "its common.pt cannot be read (EOFError)"),
        ("relax_run.json", b"[]", "its relax_run.json is not a JSON object"),
        ("relax_run.json", b"{]", "its relax_run.json cannot be read (Expecting property name"),
    ],
)
def test_damage_is_an_error_where_no_whole_checkpoint_is_left(tmp_path: Path, name: str, content: bytes | None, problem: str):
    save(tmp_path, 7)
    path = tmp_path / "iter_0000007" / name
    path.unlink() if content is None else path.write_bytes(content)
    assert message(find, tmp_path).startswith(
        f"--load {tmp_path} has no complete checkpoint left: iter_0000007 cannot be used: {problem}"
    )
    assert message(find, tmp_path, 7).startswith(f"--load {tmp_path}: iter_0000007 cannot be used: {problem}")
    assert problem == "it has no metadata.json" or message(find, tmp_path / "iter_0000007").startswith(
        f"--load {tmp_path}/iter_0000007 is damaged: {problem}"
    )


def test_a_step_can_be_asked_for(tmp_path: Path):
    for step in (10, 20):
        save(tmp_path, step)
    assert found(tmp_path, 10).path == tmp_path / "iter_0000010"
    assert message(find, tmp_path, 15) == f"--load {tmp_path} has no checkpoint of step 15; steps there: 10, 20"
    single = tmp_path / "iter_0000010"
    assert found(single) == found(single, 10) == found(tmp_path, 10)
    assert message(find, single, 20) == f"--load {single} is one checkpoint, of step 10; step 20 is not in it"


def test_another_format_is_refused(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / "iter_0000001" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert message(find, tmp_path) == (
        f"{tmp_path}/iter_0000001: a zarr checkpoint (version 1); only torch_dist version 1 can be read; convert it "
        "with Megatron-LM"
    )


@pytest.mark.usefixtures("on_cpu")
def test_megatrons_own_checkpoint_is_read_as_weights(tmp_path: Path):
    """Its `common.pt` may hold any class: it is not read. Its byte entries are not asked for."""
    path = tmp_path / "release"
    path.mkdir()
    (tmp_path / TRACKER).write_text("release")
    output = torch.arange(8.0).view(4, 2)
    state = {
        "model": {
            "output_layer.weight": ShardedTensor.from_rank_offsets("output_layer.weight", output),
            "extra": ShardedObject("layer._extra_state", b"bytes", (1,), (0,)),
        },
        "args": argparse.Namespace(lr=1e-3),
    }
    dist_checkpointing.save(state, str(path))
    info = found(tmp_path)
    assert info == CheckpointInfo(
        path=path,
        step=0,
        run={},
        reference=None,
        has_optimizer=False,
        has_rng=False,
        head="lm",
        vocab_rows=None,
        dtype=torch.float32,
    )
    asked = {"output_layer.weight": ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(4, 2))}
    got = load_checkpoint(info, {"model": asked | {"extra": ShardedObject("layer._extra_state", None, (1,), (0,))}})
    assert torch.equal(got["model"]["output_layer.weight"], output) and got["model"]["extra"] is None
