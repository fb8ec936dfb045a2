"""Saving, finding and loading: what a directory holds after each, bit for bit, and every message."""

import argparse
import io
import json
import os
import pickle
import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from relax.backend import checkpoint_store
from relax.backend.checkpoint import CheckpointInfo, CheckpointStore, find_checkpoint, load_checkpoint, save_checkpoint
from relax.errors import UserError

pytestmark = pytest.mark.usefixtures("one_process")
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


def test_layout_and_bits_of_a_checkpoint(tmp_path: Path):
    reference = {"sha256": "ab", "dtype": "bfloat16"}
    save(tmp_path, 50, files={"relax_run.json": RUN, "relax_dpo_reference.json": reference})
    assert names(tmp_path) == ["iter_0000050", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "50"
    path = tmp_path / "iter_0000050"
    assert names(path) == [
        ".metadata",
        "__0_0.distcp",
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
    assert found(tmp_path) == CheckpointInfo(
        path=path,
        step=50,
        run=RUN,
        reference=reference,
        has_optimizer=True,
        has_rng=True,
        head="lm",
        vocab_rows=None,
        dtype=torch.bfloat16,
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


# Which checkpoint is taken


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


# Saving


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def recorded(call: Callable[..., None]) -> Callable[..., None]:
        def renames(source: Path, target: Path) -> None:
            events.append(f"{Path(source).relative_to(tmp_path)} -> {Path(target).relative_to(tmp_path)}")
            call(source, target)

        return renames

    def syncs(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}").removeprefix("/"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "rename", recorded(rename))
    monkeypatch.setattr(os, "replace", recorded(replace))
    save(tmp_path, 10)
    aside = ".iter_0000010.tmp"
    files = ("__0_0.distcp", "common.pt", "relax_run.json", "metadata.json", ".metadata.tmp")
    assert events == [
        *(f"{aside}/{name}" for name in files),
        f"{aside}/.metadata.tmp -> {aside}/.metadata",
        aside,
        f"{aside} -> iter_0000010",
        "",
        f".{TRACKER}.tmp",
        f".{TRACKER}.tmp -> {TRACKER}",
        "",
    ]


def test_keep_deletes_the_oldest_but_never_the_one_just_saved(tmp_path: Path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["iter_0000020", "iter_0000030", TRACKER]
    save(tmp_path, 25, keep=1)  # a run that went back to an earlier step
    assert names(tmp_path) == ["iter_0000025", TRACKER] and found(tmp_path).step == 25


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    save(tmp_path, 10, note="first")
    save(tmp_path, 10, note="second")
    assert names(tmp_path) == ["iter_0000010", TRACKER]
    assert load_checkpoint(found(tmp_path), {"note": ""}) == {"note": "second"}


def test_leftovers_are_removed_and_a_cut_short_replacement_is_undone(tmp_path: Path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / ".iter_0000030.tmp").mkdir()
    (tmp_path / ".iter_0000030.tmp" / "part").touch()
    shutil.copytree(tmp_path / "iter_0000010", tmp_path / ".iter_0000010.old")
    (tmp_path / "iter_0000020").rename(tmp_path / ".iter_0000020.old")  # killed between the two renames
    assert found(tmp_path).step == 20 and found(tmp_path, 10).path == tmp_path / "iter_0000010"
    save(tmp_path, 40)
    assert names(tmp_path) == ["iter_0000010", "iter_0000020", "iter_0000040", TRACKER]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_former_checkpoint_whole(tmp_path: Path, background: bool):
    save(tmp_path, 10)
    store = CheckpointStore(tmp_path)
    big = tensors(0.0, big=torch.rand(100_000))
    with file_size_limit(200_000):

        def save_and_finish() -> None:
            store.save_checkpoint(step=20, state=big, files={}, async_save=background)
            store.finish_pending(blocking=True)

        text = message(save_and_finish)
    assert text == (
        f"--save {tmp_path}: iter_0000020 cannot be saved: File too large; the former checkpoint, iter_0000010, is "
        "whole. Make room or make the directory writable, then run the same command again"
    )
    assert names(tmp_path) == ["iter_0000010", TRACKER] and found(tmp_path).step == 10
    assert store.finish_pending(blocking=True)  # the failed save is over
    save(tmp_path, 20)
    assert found(tmp_path).step == 20


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    text = message(save, tmp_path / "file" / "run", 10)
    assert text == (
        f"--save {tmp_path}/file/run: iter_0000010 cannot be saved: Not a directory at {tmp_path}/file/run; no "
        "checkpoint is there yet. Make room or make the directory writable, then run the same command again"
    )


def test_a_checkpoint_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    save(tmp_path, 10)
    monkeypatch.setattr(checkpoint_store, "discard", refuse)
    assert message(save, tmp_path, 20, keep=1) == (
        f"--save {tmp_path}: iter_0000020 is saved, but iter_0000010 cannot be deleted (Permission denied) as "
        "--keep-checkpoints 1 asks"
    )
    assert found(tmp_path).step == 20


def test_a_background_save_is_a_snapshot_and_becomes_visible_in_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writing, release = threading.Event(), threading.Event()
    write = checkpoint_store.ShardWriter.write

    def slow(self: Any) -> Any:
        writing.set()
        assert release.wait(30)
        return write(self)

    monkeypatch.setattr(checkpoint_store.ShardWriter, "write", slow)
    store, weight = CheckpointStore(tmp_path), torch.ones(4)
    state = {"w": ShardedTensor.from_rank_offsets("decoder.w", weight), "step": 10}
    store.save_checkpoint(step=10, state=state, files={"relax_run.json": RUN}, async_save=True)
    assert writing.wait(30) and not store.finish_pending(blocking=False)
    weight.add_(1)  # training goes on
    assert names(tmp_path) == [".iter_0000010.tmp"] and find(tmp_path) is None
    release.set()
    assert store.finish_pending(blocking=True) and store.finish_pending(blocking=False)
    got = load_checkpoint(found(tmp_path), {"w": ShardedTensor.from_rank_offsets("decoder.w", torch.zeros(4)), "step": 0})
    assert got["w"].tolist() == [1, 1, 1, 1] and got["step"] == 10
    store.save_checkpoint(step=20, state=tensors(20), files={}, async_save=True)
    store.save_checkpoint(step=30, state=tensors(30), files={})  # finishes the pending one first
    assert names(tmp_path) == ["iter_0000010", "iter_0000020", "iter_0000030", TRACKER]


# Nothing in a checkpoint runs


class Evil:
    """Unpickled without limits, it makes a directory."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """Where code from a checkpoint would leave its trace."""
    path = tmp_path / "marker"
    Evil(path).__reduce__()[0](path)  # it would work
    path.rmdir()
    yield path
    assert not path.exists()


def test_code_in_common_does_not_run(tmp_path: Path, marker: Path):
    save(tmp_path / "run", 1)
    file = tmp_path / "run" / "iter_0000001" / "common.pt"
    torch.save({"step": Evil(marker)}, file)
    assert message(find, tmp_path / "run") == f"{file} asks for posix.mkdir: {REFUSAL}"


def test_code_in_metadata_does_not_run(tmp_path: Path, marker: Path):
    save(tmp_path / "run", 1)
    file = tmp_path / "run" / "iter_0000001" / ".metadata"
    info = found(tmp_path / "run")
    file.write_bytes(pickle.dumps(Evil(marker)))
    assert message(find, tmp_path / "run") == f"{file} asks for posix.mkdir: {REFUSAL}"
    assert message(load_checkpoint, info, tensors(0)) == f"{file} asks for posix.mkdir: {REFUSAL}"


@pytest.mark.parametrize("name", ["eval", "exec", "__import__"])
def test_metadata_admits_no_builtin(tmp_path: Path, name: str):
    save(tmp_path, 1)
    file = tmp_path / "iter_0000001" / ".metadata"
    file.write_bytes(f"cbuiltins\n{name}\n.".encode())
    assert message(find, tmp_path) == f"{file} asks for builtins.{name}: {REFUSAL}"


def test_getattr_in_metadata_gives_members_of_enumerations_only(tmp_path: Path, marker: Path):
    save(tmp_path / "run", 1)
    file = tmp_path / "run" / "iter_0000001" / ".metadata"
    # getattr(Metadata, "__init__"): the first rung of a ladder to its globals
    ladder = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR."
    file.write_bytes(ladder)
    assert "cannot be read (UnpicklingError: getattr on <class 'torch.distributed.checkpoint.metadata.Metadata'>)" in (
        message(find, tmp_path / "run")
    )


def test_files_outside_the_checkpoint_are_not_read(tmp_path: Path):
    save(tmp_path, 1)
    file = tmp_path / "iter_0000001" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for entry in metadata.storage_data.values():
        entry.relative_path = "../secret"
    file.write_bytes(pickle.dumps(metadata))
    assert message(find, tmp_path) == f"{file} names a file outside the checkpoint: '../secret'; refusing to read it"


def test_a_byte_entry_under_a_requested_key_is_refused(tmp_path: Path, marker: Path):
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "iter_0000001"
    dcp.save({"decoder.w": Evil(marker)}, checkpoint_id=path)
    asked = {"model": tensors(0)["model"]}
    assert message(load_checkpoint, found(tmp_path / "run"), asked) == (
        f"--load {path} holds decoder.w as bytes, not as a tensor: {REFUSAL}"
    )


def test_code_in_a_tensors_file_does_not_run(tmp_path: Path, marker: Path):
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "iter_0000001"
    payload = io.BytesIO()
    torch.save(Evil(marker), payload)
    (path / "__0_0.distcp").write_bytes(payload.getvalue())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, len(payload.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    text = message(load_checkpoint, found(tmp_path / "run"), {"model": tensors(0)["model"]})
    assert text.startswith(f"--load {path}: rank 0 cannot read it (UnpicklingError: Weights only load failed.")
    assert text.endswith("it is damaged or not made of tensors alone")


def test_damaged_metadata_raises_nothing_but_user_errors(tmp_path: Path):
    save(tmp_path, 1)
    file = tmp_path / "iter_0000001" / ".metadata"
    whole, generator = file.read_bytes(), random.Random(0)
    for _ in range(50):
        changed = bytearray(whole)
        for _ in range(8):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        file.write_bytes(changed)
        with suppress(UserError):  # a changed byte may also change no more than a name
            find(tmp_path)
