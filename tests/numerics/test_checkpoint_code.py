"""Nothing in a checkpoint runs."""

import io
import os
import pickle
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from relax.backend.checkpoint import load_checkpoint
from relax.errors import UserError
from tests.checkpoints import REFUSAL, find, found, message, save, tensors

pytestmark = pytest.mark.usefixtures("one_process")


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
