"""Which checkpoint is taken, and every message where none can be."""

import argparse
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from relax.backend.checkpoint.loading import CheckpointInfo, find_checkpoint, load_checkpoint
from relax.errors import UserError
from tests.checkpoints import RUN, TRACKER, find, forge, found, message, save, tensors

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
        f"{where}iter_0000030 is incomplete: its file __0_0.distcp is missing; iter_0000020 is incomplete: its file "
        f"__0_0.distcp has 100 bytes of {size}; taking iter_0000010, the newest complete checkpoint"
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("metadata.json", "it has no metadata.json"),
        (".metadata", "it has no .metadata"),
        ("common.pt", "it has no common.pt"),
        ("relax_dpo_reference.json", "its file relax_dpo_reference.json is missing"),
    ],
)
@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_missing_makes_a_checkpoint_incomplete(tmp_path: Path, name: str, problem: str, checksums: bool):
    """The one before it is taken; where there is none, it is an error."""
    for step in (6, 7):
        save(tmp_path, step, files={"relax_run.json": RUN, "relax_dpo_reference.json": {}})
    path = tmp_path / "iter_0000007"
    (path / name).unlink()
    if not checksums:
        (path / "checksums.json").unlink()
    elif name != "metadata.json":
        problem = f"its file {name} is missing"
    if not checksums and name == "relax_dpo_reference.json":
        assert found(tmp_path).step == 7 and found(tmp_path).reference is None  # nothing tells that it had one
        return
    said: list[str] = []
    info = find(tmp_path, said=said)
    assert info and info.step == 6
    taking = "taking iter_0000006, the newest complete checkpoint"
    assert said == [f"--load {tmp_path}: iter_0000007 is incomplete: {problem}; {taking}"]
    assert message(find, tmp_path, 7) == f"--load {tmp_path}: iter_0000007 is incomplete: {problem}"
    assert name == "metadata.json" or message(find, path) == f"--load {path} is incomplete: {problem}"
    shutil.rmtree(tmp_path / "iter_0000006")
    assert message(find, tmp_path) == (
        f"--load {tmp_path} has no complete checkpoint left: iter_0000007 is incomplete: {problem}; restore one, or remove the "
        "directory to start a new run"
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metadata.json", b"{", "its metadata.json cannot be read (Expecting property name"),
        (".metadata", b"\x80\x04", "its .metadata cannot be read (byte 2: it ends early, or takes what is not there)"),
        (".metadata", b"", "its .metadata cannot be read (byte 0: it ends early, or takes what is not there)"),
        ("common.pt", b"PK\x03\x04", "its common.pt cannot be read (RuntimeError): it is damaged, or not of tensors and plain"),
        ("common.pt", b"", "its common.pt is not what torch.save writes: it is damaged, or made to run code"),
        ("relax_run.json", b"[]", "its relax_run.json is not a JSON object"),
        ("relax_run.json", b"{]", "its relax_run.json cannot be read (Expecting property name"),
        ("relax_run.json", b'{"arguments": []}', "its relax_run.json has no dict as arguments"),
        ("checksums.json", b"{}", "its checksums.json cannot be read ('algorithm')"),
    ],
)
def test_damage_is_an_error_that_names_the_checkpoint_before(tmp_path: Path, name: str, content: bytes, problem: str):
    """Never a fall back: with checksums and without, by the tracker, by its step and by its own directory."""
    for step in (5, 6, 7):
        save(tmp_path, step)
    path = tmp_path / "iter_0000007"
    (path / name).write_bytes(content)
    known = problem if name == "checksums.json" else f"its {name} does not hold what was saved (the checksum differs)"
    for expected in (known, problem):
        way_out = f"; --load {tmp_path} --ckpt-step 6 takes the newest complete checkpoint before it"
        for refused in (message(find, tmp_path), message(find, tmp_path, 7), message(find, path)):
            assert refused.startswith(f"--load {path} is damaged: {expected}") and refused.endswith(way_out)
        forge(path / name, content) if name != "checksums.json" else None
    with pytest.raises(UserError, match="--ref-load .*; --ref-load .* --ref-ckpt-step 6 takes"):
        find_checkpoint(tmp_path, step=None, flag="--ref-load", say=print)
    (tmp_path / "iter_0000006" / "common.pt").write_bytes(b"")
    assert message(find, tmp_path).endswith(" --ckpt-step 5 takes the newest complete checkpoint before it")
    (tmp_path / "iter_0000005" / "common.pt").unlink()
    assert message(find, tmp_path).endswith("; no complete checkpoint is before it: restore the file")


def test_one_bit_anywhere_in_a_checkpoint_is_damage(tmp_path: Path):
    """In each file, at its start, its end and between: found when it is read, and no tensor is taken."""
    for step in (1, 2):
        save(tmp_path, step, files={"relax_run.json": RUN, "relax_dpo_reference.json": {"sha256": "ab"}})
    path, asked = tmp_path / "iter_0000002", {"step": 0, "scheduler": {}, "rng": {}}
    way_out = f"--load {tmp_path} --ckpt-step 1 takes the newest complete checkpoint before it"
    generator = random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in (0, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(10))):
            changed = bytearray(whole)
            changed[at] ^= 1 << generator.randrange(8)
            file.write_bytes(changed)
            refused = message(lambda: load_checkpoint(found(tmp_path), tensors(0) | asked))
            assert refused.startswith(f"--load {path} is damaged: its ") and file.name in refused, (file, at)
            assert refused.endswith(way_out)
        file.write_bytes(whole)
    assert torch.equal(load_checkpoint(found(tmp_path), tensors(0))["model"]["w"], tensors(2)["model"]["w"].data)


def test_only_what_is_read_is_checked(tmp_path: Path):
    """A damaged moment does not keep anybody from the weights."""
    save(tmp_path, 1)
    file = tmp_path / "iter_0000001" / "__0_0.distcp"
    info = found(tmp_path)
    place = next(extent for index, extent in info.contents.metadata.storage_data.items() if index.fqn.startswith("optimizer"))
    changed = bytearray(file.read_bytes())
    changed[place.offset + place.length // 2] ^= 1
    file.write_bytes(changed)
    assert load_checkpoint(info, {"model": tensors(0)["model"]})
    assert message(load_checkpoint, info, tensors(0)) == (
        f"--load {file.parent} is damaged: its file __0_0.distcp does not hold what was saved (the checksum of "
        "optimizer.state.param.decoder.w differs); no complete checkpoint is before it: restore the file"
    )


def test_a_checkpoint_without_checksums_loads_and_says_so_once(tmp_path: Path):
    save(tmp_path, 1)
    said: list[str] = []
    assert find(tmp_path, said=said) and said == []
    (tmp_path / "iter_0000001" / "checksums.json").unlink()
    info = find(tmp_path, said=said)
    assert info and said == [
        f"--load {tmp_path}/iter_0000001 has no checksums, as one made elsewhere or long ago: damage to its tensors would not "
        "be noticed"
    ]
    assert torch.equal(load_checkpoint(info, tensors(0))["model"]["w"], tensors(1)["model"]["w"].data) and len(said) == 1


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
    forge(tmp_path / "iter_0000001" / "metadata.json", b'{"sharded_backend": "zarr", "sharded_backend_version": 1}')
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
        contents=info.contents,
    )
    assert info.contents.common == {} and info.contents.checksums is None
    asked = {"output_layer.weight": ShardedTensor.from_rank_offsets("output_layer.weight", torch.zeros(4, 2))}
    got = load_checkpoint(info, {"model": asked | {"extra": ShardedObject("layer._extra_state", None, (1,), (0,))}})
    assert torch.equal(got["model"]["output_layer.weight"], output) and got["model"]["extra"] is None
