"""What a model's directory may hold for weights: regular files of its own, whose headers tell the truth."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax.backend.weights.tensor_files import TensorFiles
from relax.errors import UserError
from tests.models import load, save_tiny


def rename_in(index: Path, name: Any) -> None:
    """Make the index name `name` for the tensors of one shard."""
    content = json.loads(index.read_text())
    first = sorted(content["weight_map"].values())[0]
    content["weight_map"] = {key: name if file == first else file for key, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in shards beside another one's; its index."""
    for name in ("other", "model"):
        save_tiny(tmp_path / name, "qwen3", shard_size="50KB")
    return tmp_path / "model" / "model.safetensors.index.json"


SHARD = "model-00001-of-00006.safetensors"
OUTSIDE = [f"../other/{SHARD}", "/etc/passwd", f"./{SHARD}", "..", ".", "", "a/b", "a\0b", 3, None, 1.5]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_directory_alone(sharded: Path, name: Any) -> None:
    rename_in(sharded, name)
    with pytest.raises(UserError, match=r"index.json: (names .* which is no file of this directory|not a safetensors index)"):
        load(sharded.parent)


@pytest.mark.usefixtures("on_cpu")
def test_a_shard_that_is_not_a_file_of_the_directory_is_refused(sharded: Path) -> None:
    shard = shards(sharded)[0]
    for make, message in (
        (lambda: shard.symlink_to(shards(sharded.parents[1] / "other" / sharded.name)[0]), "a link that leaves the model's"),
        (lambda: shard.symlink_to("/dev/zero"), "not a file"),
        (lambda: shard.symlink_to(shard.name), "unreadable (Too many levels of symbolic links)"),
        (lambda: os.mkfifo(shard), "not a file"),  # which would wait for ever
        (shard.mkdir, "not a file"),
    ):
        shard.unlink()
        make()
        with pytest.raises(UserError) as caught:
            load(sharded.parent)
        assert str(caught.value).startswith(f"{shard}: {message}")
    shard.rmdir()
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (sharded.parent / name).unlink(missing_ok=True)
        os.mkfifo(sharded.parent / name)
        with pytest.raises(UserError, match=f"{name}: not a file"):
            load(sharded.parent)
        (sharded.parent / name).unlink()


@pytest.mark.usefixtures("on_cpu")
def test_a_hubs_snapshot_is_links_to_its_own_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    blobs = tmp_path / "models--a--b/blobs"
    save_tiny(snapshot, "qwen3", shard_size="50KB")
    expected = stored_tensors(snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert stored_tensors(snapshot).keys() == expected.keys()
    load(snapshot)
    shard = shards(snapshot / "index")[0]
    (tmp_path / "elsewhere").mkdir()
    target = shard.resolve().rename(tmp_path / "elsewhere" / "0")
    shard.unlink()
    shard.symlink_to(target)
    with pytest.raises(UserError, match="a link that leaves the model's directory"):
        load(snapshot)


@pytest.mark.usefixtures("on_cpu")
def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=f"{second.name}: has .* as {first.name} does"):
        load(sharded.parent)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **changes}


LIES: dict[str, tuple[Any, ...]] = {
    "short": ({"w": tensor(data_offsets=[0, 60])},),
    "long": ({"w": tensor(data_offsets=[0, 68])},),
    "behind the file": ({"w": tensor(shape=[8, 4], data_offsets=[0, 128])},),
    "not all of the file": ({"w": tensor()}, bytes(80)),
    "gap": ({"w": tensor(shape=[2, 4], data_offsets=[32, 64])},),
    "overlap": ({"v": tensor(), "w": tensor()},),
    "backwards": ({"w": tensor(data_offsets=[64, 0])},),
    "negative offset": ({"w": tensor(data_offsets=[-4, 60])},),
    "negative shape": ({"w": tensor(shape=[-4, -4])},),
    "size that wraps round": ({"w": tensor(shape=[2**63, 2, 4, 4])},),
    "dtype": ({"w": tensor(dtype="\x1b[31mF" + "3" * 10**6)},),
    "narrower dtype": ({"w": tensor(dtype="F16")},),
    "no object": ([1],),
    "nested": (b"[" * 10**6,),
    "empty": (b"", b""),
    "header longer than the file": ({"w": tensor()}, bytes(64), 99_999_999),
    "header of a terabyte": ({"w": tensor()}, bytes(64), 2**40),
    "header beyond 64 bits": ({"w": tensor()}, bytes(64), 2**64 - 8),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    header, data, length = (*LIES[lie], *(bytes(64), None)[len(LIES[lie]) - 1 :])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    (tmp_path / "model.safetensors").write_bytes(size + text + data)
    with pytest.raises(UserError, match=r"model.safetensors: unreadable or cut short \(") as caught:
        TensorFiles(tmp_path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path)) and str(caught.value).isprintable()


@pytest.mark.usefixtures("on_cpu")
def test_a_spoilt_header_is_one_message_or_the_same_weights(tmp_path: Path) -> None:
    """500 files with a byte, a digit or a span of the header changed."""
    save_tiny(tmp_path, "qwen3")
    file, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    digits = [at for at in range(8, end) if chr(whole[at]).isdigit()]
    expected = {name: tuple(stored.shape) for name, stored in stored_tensors(tmp_path).items()}
    refused = 0
    for number in range(500):
        spoilt = bytearray(whole)
        if number % 3 == 0:
            spoilt[rng.integers(0, end)] = rng.integers(0, 256)
        elif number % 3 == 1:
            spoilt[rng.choice(digits)] = ord("0") + rng.integers(0, 10)
        else:
            first = rng.integers(0, end)
            del spoilt[first : first + rng.integers(1, 50)]
        file.write_bytes(spoilt)
        try:
            files = TensorFiles(tmp_path)
            files.check(expected, ignored=set())
            assert all(files.read(name, axis=None, first=0, size=0).shape == shape for name, shape in expected.items())
        except UserError as error:
            refused += 1
            assert str(error).count("\n") == 0
    assert refused > 300


def shards(index: Path) -> list[Path]:
    return sorted(index.parent.glob("model-*.safetensors"))


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("model*.safetensors") for name, t in load_file(file).items()}
