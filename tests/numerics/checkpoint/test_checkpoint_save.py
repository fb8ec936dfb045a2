"""Saving: complete or invisible, on a full disk, over a former one, in the background."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from relax.backend.checkpoint import store as checkpoint_store
from relax.backend.checkpoint.loading import CheckpointStore, load_checkpoint
from tests.checkpoints import RUN, TRACKER, file_size_limit, find, found, message, names, save, tensors

pytestmark = pytest.mark.usefixtures("one_process")


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
        f"{aside}/checksums.json",
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


@pytest.mark.parametrize("sees_gpu", [False, True])
def test_content_is_asked_for_once_the_tensor_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_gpu: bool
):
    """The writer frees what it was given; where torch sees a GPU its own writer would read ahead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    sizes = range(1, 8)
    state = {str(n): ShardedTensor.from_rank_offsets(str(n), torch.empty(n, device="meta")) for n in sizes}
    CheckpointStore(tmp_path).save_checkpoint(
        step=1, state=state, files={"relax_run.json": RUN}, content=lambda view: torch.full(view.shape, float(view.numel()))
    )
    monkeypatch.undo()
    got = load_checkpoint(found(tmp_path), {str(n): ShardedTensor.from_rank_offsets(str(n), torch.zeros(n)) for n in sizes})
    assert [got[str(n)].tolist() for n in sizes] == [[float(n)] * n for n in sizes]
