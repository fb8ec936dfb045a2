"""Nothing in a checkpoint runs, and nothing in it changes a class: each attempt is one UserError.

Forged files come without checksums, which keep nobody from forging: who can write a checkpoint can write those.
"""

import io
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import torch as megatron_strategies
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from relax.backend.checkpoint import inert_pickle
from relax.backend.checkpoint import metadata as checkpoint_metadata
from relax.backend.checkpoint import read as checkpoint_read
from relax.backend.checkpoint.loading import load_checkpoint
from relax.backend.checkpoint.metadata import Damaged, Incomplete, read_metadata
from relax.errors import UserError
from tests.checkpoints import REFUSAL, find, forge, found, message, save, tensors

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


def state_of_classes() -> dict[type, tuple[Any, ...]]:
    """All that a pickle could change of the classes that checkpoints are made of, and of those that read them."""
    modules = (metadata, planner, filesystem, megatron_strategies, pickle, inert_pickle, checkpoint_metadata, checkpoint_read)
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    functions = [value for module in modules for value in vars(module).values() if hasattr(value, "__code__")]
    assert planner.WriteItemType in classes and metadata.TensorStorageMetadata in classes and len(functions) > 50
    cached = "__slotnames__"  # which pickle.dumps leaves
    state: dict[Any, tuple[Any, ...]] = {
        value: ({key: item for key, item in vars(value).items() if key != cached}, value.__bases__) for value in classes
    }
    return state | {value: (value.__code__, value.__defaults__, dict(vars(value))) for value in functions}


@pytest.fixture
def classes_stay(tmp_path: Path) -> Iterator[None]:
    save(tmp_path / "first", 1)
    load_checkpoint(found(tmp_path / "first"), tensors(0))  # torch caches in a class what it knows of it
    before = state_of_classes()
    yield
    assert state_of_classes() == before


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


KIND = name("torch.distributed.checkpoint.planner", "WriteItemType")
ENTRY = name("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
PROPERTIES = name("torch.distributed.checkpoint.metadata", "TensorProperties")
BYTES = name("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
PATH = name("pathlib", "PosixPath")
SLOTS = b"N}" + text("__bases__") + BYTES + b"\x85s\x86"  # (None, {"__bases__": (BytesStorageMetadata,)})
DICT = b"}" + text("__setstate__") + KIND + b"s"
MKDIR = "posix", "mkdir"

# What comes before STOP. Each would, in some unpickler, reach a class, a function or code.
FORGED: dict[str, Callable[[str], bytes]] = {
    "BUILD of a class with slots": lambda path: KIND + SLOTS + b"b",
    "BUILD of a class with a state": lambda path: ENTRY + DICT + b"b",
    "BUILD of a class with a tuple": lambda path: PROPERTIES + SLOTS + b"b",
    "BUILD of a function": lambda path: name("torch.serialization", "_get_layout") + SLOTS + b"b",
    "BUILD of a builtin": lambda path: name("torch", "Size") + SLOTS + b"b",
    "BUILD of a dtype": lambda path: name("torch", "float32") + SLOTS + b"b",
    "BUILD of a dict": lambda path: b"}" + SLOTS + b"b",
    "BUILD of an instance with slots": lambda path: ENTRY + b")\x81" + SLOTS + b"b",
    "BUILD of an instance, twice": lambda path: ENTRY + b")\x81}b}b",
    "BUILD from the memo": lambda path: KIND + b"\x940h\x00" + SLOTS + b"b",
    "BUILD of a class from the memo, by PUT": lambda path: KIND + b"q\x07h\x07" + SLOTS + b"b",
    "SETITEM of a class": lambda path: KIND + text("x") + KIND + b"s",
    "SETITEMS of a class's dict": lambda path: KIND + text("__dict__") + b"\x86" + PATH + b"R(" + text("x") + b"Nu",
    "APPEND to an instance": lambda path: ENTRY + b")\x81" + KIND + b"a",
    "APPENDS to a class": lambda path: KIND + b"(" + KIND + b"e",
    "ADDITEMS": lambda path: b"\x8f(" + KIND + b"\x90",
    "REDUCE of getattr": lambda path: name("builtins", "getattr") + ENTRY + text("__init__") + b"\x86R",
    "REDUCE of getattr on a module's name": lambda path: name("builtins", "getattr") + KIND + text("mro") + b"\x86R)R",
    "REDUCE of what REDUCE gave": lambda path: name("builtins", "getattr") + KIND + text("mro") + b"\x86R)RR",
    "REDUCE of text": lambda path: text("posix.mkdir") + text(path) + b"\x85R",
    "REDUCE without a tuple": lambda path: PATH + text(path) + b"R",
    "INST": lambda path: b"(" + text(path) + b"iposix\nmkdir\n",
    "INST of an admitted class": lambda path: b"(" + text(path) + b"ipathlib\nPosixPath\n",
    "OBJ": lambda path: b"(" + KIND + text(path) + b"o",
    "NEWOBJ of a class made by a class": lambda path: KIND + KIND + b"\x85\x81)\x81",
    "NEWOBJ of text": lambda path: text("mkdir") + text(path) + b"\x85\x81",
    "NEWOBJ_EX": lambda path: ENTRY + b")}\x92",
    "PERSID": lambda path: b"Pposix.mkdir\n",
    "BINPERSID": lambda path: text("posix.mkdir") + b"Q",
    "EXT1": lambda path: b"\x82\x01",
    "EXT2": lambda path: b"\x83\x01\x00",
    "EXT4": lambda path: b"\x84\x01\x00\x00\x00",
    "GLOBAL": lambda path: b"cposix\nmkdir\n" + text(path) + b"\x85R",
    "STACK_GLOBAL": lambda path: name(*MKDIR) + text(path) + b"\x85R",
    "STACK_GLOBAL of a dotted name": lambda path: name("torch.distributed.checkpoint.planner", "WriteItemType.__class__"),
    "STACK_GLOBAL of a module in an admitted one": lambda path: name("torch.distributed.checkpoint.metadata", "os.mkdir"),
    "STACK_GLOBAL of no text": lambda path: b"NN\x93",
    "a dtype that is none": lambda path: name("torch", "load"),
    "the reader's own class": lambda path: name("relax.backend.checkpoint.inert_pickle", "Record"),
    "NEXT_BUFFER": lambda path: b"\x97",
    "BYTEARRAY8 of all memory": lambda path: b"\x96" + struct.pack("<Q", 1 << 62),
    "BINUNICODE8 of all memory": lambda path: b"\x8d" + struct.pack("<Q", 1 << 62),
    "PUT far away": lambda path: KIND + b"r\xff\xff\xff\x7f",  # pickle's own reader would claim 32 GiB
    "a key nested too deep to hash": lambda path: b"})" + b"\x85" * 200_000 + b"Ns",
    "GET of nothing": lambda path: b"h\x05",
    "POP of nothing": lambda path: b"00",
    "an endless integer": lambda path: b"\x8b" + struct.pack("<i", 1 << 30),
    "no metadata": lambda path: b"}",
}


@pytest.mark.usefixtures("classes_stay")
@pytest.mark.parametrize("attempt", FORGED)
def test_no_opcode_reaches_a_class_or_runs(tmp_path: Path, marker: Path, attempt: str):
    save(tmp_path / "run", 1)
    info = found(tmp_path / "run")
    file = info.path / ".metadata"
    forge(file, b"\x80\x04" + FORGED[attempt](str(marker)) + b".")
    refused = message(find, tmp_path / "run")
    assert refused.startswith((f"--load {info.path} is damaged: its .metadata cannot be read (", f"{file} asks for "))
    if attempt in ("GLOBAL", "STACK_GLOBAL"):
        assert refused == f"{file} asks for posix.mkdir: {REFUSAL}"
    # What was read before is not read again: the tensors come from their own file.
    assert torch.equal(load_checkpoint(info, tensors(0))["model"]["w"], (torch.arange(12.0).view(3, 4) / 7 + 1).bfloat16())


@pytest.mark.usefixtures("classes_stay")
def test_a_forged_class_does_not_turn_tensors_into_bytes(tmp_path: Path, marker: Path):
    """The attack that a restricted unpickler let through: a class gets a base, tensors pass for bytes, bytes are unpickled."""
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "iter_0000001"
    payload = io.BytesIO()
    torch.save(Evil(marker), payload)
    (path / "__0_0.distcp").write_bytes(payload.getvalue())
    whole = pickle.loads((path / ".metadata").read_bytes())
    for entry in whole.storage_data.values():
        entry.offset, entry.length = 0, len(payload.getvalue())
    forged = pickle.dumps(whole, protocol=4)
    planner_data = text("planner_data") + b"\x94"
    assert forged.count(planner_data + b"N") == 1  # which loading does not use
    forge(path / ".metadata", forged.replace(planner_data + b"N", planner_data + KIND + SLOTS + b"b"))
    assert message(find, tmp_path / "run").startswith(f"--load {path} is damaged: its .metadata cannot be read (byte ")
    forge(path / ".metadata", forged)
    refused = message(load_checkpoint, found(tmp_path / "run"), {"model": tensors(0)["model"]})
    assert refused == f"{path}/__0_0.distcp asks for posix.mkdir: {REFUSAL}"


@pytest.mark.usefixtures("classes_stay")
def test_ten_thousand_mutated_metadata_raise_nothing_but_user_errors(tmp_path: Path, marker: Path):
    """Each is read to the end: those that still are metadata serve the load, which reads tensors or is refused."""
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "iter_0000001"
    whole = (path / ".metadata").read_bytes()
    pieces = [build(str(marker)) for build in FORGED.values()]
    pieces = [piece for piece in pieces if len(piece) < 1000]
    generator, outcomes = random.Random(0), {"read": 0, "refused": 0}
    for _ in range(10_000):
        try:
            read_metadata(path, mutated(whole, pieces, generator))
            outcomes["read"] += 1
        except (UserError, Damaged, Incomplete) as error:
            assert len(str(error)) < 1000 and "\n" not in str(error) and "weights_only" not in str(error)
            outcomes["refused"] += 1
    assert outcomes["read"] > 100 and outcomes["refused"] > 5000, outcomes


def mutated(whole: bytes, pieces: list[bytes], generator: random.Random) -> bytes:
    """Changed, inserted, removed, doubled and forged bytes."""
    content = bytearray(whole)
    for _ in range(generator.choice((1, 1, 2, 8))):
        at = generator.randrange(len(content))
        end = min(len(content), at + generator.randrange(1, 40))
        match generator.randrange(6):
            case 0:
                content[at] = generator.randrange(256)
            case 1:
                content[at:at] = generator.randbytes(end - at)
            case 2:
                del content[at:end]
            case 3:
                content[at:at] = content[at:end]
            case 4:
                content[at:at] = generator.choice(pieces)
            case 5:
                content[at] ^= 1 << generator.randrange(8)
    return bytes(content)


def test_mutated_checkpoints_are_found_loaded_or_refused_in_one_message(tmp_path: Path, marker: Path):
    """The same through the entrance, with an earlier checkpoint to fall back to: damage never does."""
    for step in (1, 2):
        save(tmp_path / "run", step)
    path = tmp_path / "run" / "iter_0000002"
    (path / "checksums.json").unlink()
    whole, generator = (path / ".metadata").read_bytes(), random.Random(1)
    for _ in range(100):
        (path / ".metadata").write_bytes(mutated(whole, [FORGED["STACK_GLOBAL"](str(marker))], generator))
        said: list[str] = []
        try:
            info = find(tmp_path / "run", said=said)
            assert info and (info.step == 2 or "iter_0000002 is incomplete: its file" in said[0]), said
            load_checkpoint(info, tensors(0))
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("content", ["pickle", "torch.save", "protocol 0", "text"])
def test_a_payload_beside_the_tensors_is_no_damage(tmp_path: Path, marker: Path, content: str):
    """It is refused by the file's name, though an earlier checkpoint is complete."""
    for step in (1, 2):
        save(tmp_path / "run", step)
    file = tmp_path / "run" / "iter_0000002" / "common.pt"
    saved = io.BytesIO()
    torch.save({"step": Evil(marker)}, saved)
    payload = {
        "pickle": pickle.dumps(Evil(marker)),
        "torch.save": saved.getvalue(),
        "protocol 0": b"cposix\nmkdir\n(S'" + str(marker).encode() + b"'\ntR.",
        "text": b"import os",
    }
    file.write_bytes(payload[content])
    way_out = f"--load {tmp_path}/run --ckpt-step 1 takes the newest complete checkpoint before it"
    damaged = f"--load {file.parent} is damaged: its common.pt"
    assert message(find, tmp_path / "run") == f"{damaged} does not hold what was saved (the checksum differs); {way_out}"
    forge(file, payload[content])
    assert message(find, tmp_path / "run") == (
        f"{file} asks for posix.mkdir: {REFUSAL}"
        if content == "torch.save"
        else f"{damaged} is not what torch.save writes: it is damaged, or made to run code; {way_out}"
    )


def test_registered_classes_are_not_admitted(tmp_path: Path):
    """What a library told torch to trust is no part of a checkpoint."""
    save(tmp_path, 1)
    buffer = io.BytesIO()
    torch.save({"step": Evil(tmp_path)}, buffer)
    forge(tmp_path / "iter_0000001" / "common.pt", buffer.getvalue())
    with torch.serialization.safe_globals([os.mkdir]):
        assert message(find, tmp_path) == f"{tmp_path}/iter_0000001/common.pt asks for posix.mkdir: {REFUSAL}"
        assert os.mkdir in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("place", ["../secret", "..", "/etc/passwd", "a/b"])
def test_files_outside_the_checkpoint_are_not_read(tmp_path: Path, place: str):
    save(tmp_path, 1)
    file = tmp_path / "iter_0000001" / ".metadata"
    forged = pickle.loads(file.read_bytes())
    for entry in forged.storage_data.values():
        entry.relative_path = place
    forge(file, pickle.dumps(forged))
    assert message(find, tmp_path) == f"{file} names a file outside the checkpoint: {place!r}; refusing to read it"


def test_a_byte_entry_is_refused(tmp_path: Path, marker: Path):
    """In a run's checkpoint under any key; in one made elsewhere, which has some, under a key that is asked for."""
    save(tmp_path / "run", 1)
    path = tmp_path / "run" / "iter_0000001"
    (path / "checksums.json").unlink()
    dcp.save({"decoder.w": Evil(marker)}, checkpoint_id=path)
    assert message(find, tmp_path / "run") == f"{path}/.metadata holds 'decoder.w' as bytes, not as a tensor: {REFUSAL}"
    (path / "relax_run.json").unlink()
    asked = {"model": tensors(0)["model"]}
    assert message(load_checkpoint, found(tmp_path / "run"), asked) == (
        f"--load {path} holds decoder.w as bytes, not as a tensor: {REFUSAL}"
    )


def test_the_planner_loads_no_bytes(tmp_path: Path, marker: Path):
    """Whatever made it believe that they are asked for."""
    save(tmp_path / "run", 1)
    info = found(tmp_path / "run")
    index = next(iter(info.contents.metadata.storage_data))
    item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([1]))
    reader, planned = checkpoint_read._Reader(info.path, info.contents), checkpoint_read._LoadPlanner()
    refused = f"the checkpoint holds decoder.w as bytes, not as a tensor: {REFUSAL}"
    assert message(reader.read_data, LoadPlan([item]), planned) == refused
    assert message(planned.load_bytes, item, io.BytesIO(pickle.dumps(Evil(marker)))) == refused


def test_code_in_a_tensors_file_does_not_run(tmp_path: Path, marker: Path):
    for protocol, start in ((None, "{file} asks for posix.mkdir: "), (2, "--load {path} is damaged: its __0_0.distcp is not")):
        save(tmp_path / "run", 1)
        path = tmp_path / "run" / "iter_0000001"
        payload = io.BytesIO()
        if protocol is None:
            torch.save(Evil(marker), payload)
        else:
            pickle.dump(Evil(marker), payload, protocol=protocol)
        (path / "__0_0.distcp").write_bytes(payload.getvalue())
        forged = pickle.loads((path / ".metadata").read_bytes())
        for entry in forged.storage_data.values():
            entry.offset, entry.length = 0, len(payload.getvalue())
        forge(path / ".metadata", pickle.dumps(forged))
        refused = message(load_checkpoint, found(tmp_path / "run"), {"model": tensors(0)["model"]})
        assert refused.startswith(start.format(file=path / "__0_0.distcp", path=path))
        assert "weights_only" not in refused and "\n" not in refused
