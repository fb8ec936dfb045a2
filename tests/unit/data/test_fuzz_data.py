"""A thousand mutated rows and three hundred broken files: each row is kept or counted, each file read or refused by name.

Nothing else leaves the loader: never a traceback, never a row that disappears.
"""

import bz2
import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from relax.data import GroupDataset
from relax.errors import UserError
from tests.unit.data.samples import CHATML, LLAMA, QWEN3, assistant, build_tokenizer, chat_row, load, user, write_jsonl

HUGE = "a number of 5,000 digits"  # which Python writes as little as it reads
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 2.5, float("nan"), float("inf"), 10**400, HUGE, "", " ", "\n", "x", "\ud800", "\0", "a" * 5_000,
    "\n\nHuman: a\n\nAssistant:", "\n\nAssistant: a", "<|im_end|>", "<|im_start|>system\n", "<think>", "</think>", "[1", "{",
    '[{"role": "user"}]', "null", "[]", [], {}, [[]], [None], [{}], [[["a"]]], ["a", "b"], {"a": 1}, {"role": "user"},
    {"role": None, "content": None}, {"role": "assistant", "content": ["a"]}, {"from": "gpt", "value": 3},
    {"role": "tool", "content": "x", "tool_calls": 1}, {"content": {"text": "a"}}, [user("a"), user("b")],
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}, {"role": "assistant", "tool_calls": [{}]},
)  # fmt: skip
NAMES = ("prompt", "chosen", "rejected", "question", "system", "history", "conversations", "messages", "tools", "margin",
         "chat_template_kwargs", "input", "role", "content", "from", "value", "other", "")  # fmt: skip


def row(kind: str, number: int) -> dict[str, Any]:
    """A good row of a format, unlike every other."""
    question, chosen, rejected = f"Q{number}?", f"yes {number}", f"no {number}"
    if kind == "implicit":
        return chat_row(question, chosen, rejected)
    if kind == "explicit":
        return {"prompt": [user(question)], "chosen": assistant(chosen), "rejected": [assistant(rejected)], "margin": 0.5}
    if kind == "plain":
        return {"prompt": question, "chosen": chosen, "rejected": rejected, "tools": "[]"}
    if kind == "alpaca":
        past = {"history": [["a", "b"]], "input": "now"}
        return {"instruction": question, **past, "chosen": chosen, "rejected": rejected}
    if kind == "sharegpt":
        answers = {"chosen": {"from": "gpt", "value": chosen}, "rejected": {"from": "gpt", "value": rejected}}
        return {"conversations": [{"from": "human", "value": question}], **answers}
    dialogue = f"\n\nHuman: {question}\n\nAssistant: "
    return {"chosen": dialogue + chosen, "rejected": dialogue + rejected}


KINDS = ("implicit", "explicit", "plain", "alpaca", "sharegpt", "dialogue")


def mutated(value: Any, generator: random.Random) -> Any:
    """The value with one part of it replaced, dropped, renamed, doubled, wrapped, or written as text."""
    if generator.random() < 0.3 or not value or not isinstance(value, dict | list):
        choices = [generator.choice(ODD)] * 4 + [[value], {"content": value}, json.dumps(value), str(value)]
        return generator.choice(choices)
    value = copy.copy(value)
    key = generator.choice(list(value)) if isinstance(value, dict) else generator.randrange(len(value))
    action = generator.random()
    if action < 0.7:
        value[key] = mutated(value[key], generator)
    elif isinstance(value, list):
        value.insert(key, copy.deepcopy(generator.choice(value))) if action < 0.85 else value.pop(key)
    elif action < 0.85:
        value[generator.choice(NAMES)] = value.pop(key)
    else:
        del value[key]
    return value


def outcome(path: Path, tokenizer: Path, **options: Any) -> GroupDataset | str:
    """What a file gives: pairs, or the message that refuses it."""
    try:
        return load(path, tokenizer, cache=path.parent / "cache", **options)
    except UserError as error:
        assert 10 < len(str(error)) < 5_000, str(error)[:300]
        return str(error)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("tokenizers")
    templates = (CHATML, QWEN3, LLAMA)
    return [build_tokenizer(directory / str(i), template=template) for i, template in enumerate(templates)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_row_is_kept_or_counted(tmp_path: Path, tokenizers: list[Path], kind: str) -> None:
    generator = random.Random(kind)
    files = 0
    for number in range(7):
        good = [row(kind, i) for i in range(30)]
        odd = [mutated(row(kind, i), generator) for i in range(100, 125)]
        rows = [good[0], *generator.sample(good[1:] + odd, len(good) + len(odd) - 1)]
        text = "".join(json.dumps(entry) + "\n" for entry in rows).replace(json.dumps(HUGE), "9" * 5_000)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text)
        found = outcome(path, tokenizers[number % 3])
        if isinstance(found, str):
            assert found.startswith(f"{path}:") or found.startswith("More than half"), found
            continue
        files += 1
        report = found.report
        assert report.rows_read == len(rows) and report.rows_kept + report.rows_rejected == len(rows)
        assert len(found) == report.rows_kept >= 25
        assert all(all(map(len, found[i].completions)) for i in range(len(found)))
    assert files >= 3


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    write_jsonl(path, rows)


def array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1))


def csv(path: Path, rows: list[dict[str, Any]]) -> None:
    pa.csv.write_csv(pa.Table.from_pylist(rows), path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def gz(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(entry) + "\n" for entry in rows).encode()))


def bz(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(bz2.compress("".join(json.dumps(entry) + "\n" for entry in rows).encode()))


def zst(path: Path, rows: list[dict[str, Any]]) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write("".join(json.dumps(entry) + "\n" for entry in rows).encode())


WRITERS: dict[str, tuple[str, Callable[[Path, list[dict[str, Any]]], None]]] = {
    "lines": ("jsonl", jsonl),
    "array": ("json", array),
    "csv": ("csv", csv),
    "parquet": ("parquet", parquet),
    "arrow file": ("arrow", arrow_file),
    "arrow stream": ("arrow", arrow_stream),
    "gzip": ("jsonl.gz", gz),
    "bzip2": ("jsonl.bz2", bz),
    "zstd": ("jsonl.zst", zst),
}


def cut(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def flipped(content: bytes, generator: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 3, 20))):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def garbage(content: bytes, generator: random.Random) -> bytes:
    return generator.randbytes(len(content))


def hole(content: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(content))
    return content[:at] + bytes(200) + content[at + 200 :]


def moved(content: bytes, generator: random.Random) -> bytes:
    """Another beginning."""
    heads = (
        b"",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\x1f\x8b\x08\x00",
        b"PAR1",
        b"ARROW1\0\0",
        b"PK\x03\x04",
        b"\0" * 16,
        b"[",
        b"{}\n",
    )
    return generator.choice(heads) + content[generator.choice((0, 0, 4, 8)) :]


def longer(content: bytes, generator: random.Random) -> bytes:
    return content + generator.choice((b"\0", b"\n\n", b"}", b"\xe9\n", generator.randbytes(50), content[:100], b"9" * 5_000))


def spliced(content: bytes, generator: random.Random) -> bytes:
    at = generator.randrange(len(content))
    pieces = (b"\xe9", b"\r\n", b"\0", b'"', b"\n", b"9" * 5_000, b"[" * 2_000, "é".encode("utf-16"), b"\xed\xa0\x80")
    return content[:at] + generator.choice(pieces) + content[at:]


def swapped(content: bytes, generator: random.Random) -> bytes:
    at, other = sorted(generator.randrange(len(content)) for _ in range(2))
    return content[other:] + content[at:other] + content[:at]


BREAKS = (cut, cut, flipped, flipped, garbage, hole, moved, moved, longer, spliced, spliced, swapped)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_broken_file_is_read_or_refused_by_name(tmp_path: Path, tokenizers: list[Path], kind: str) -> None:
    generator, (suffix, write) = random.Random(kind), WRITERS[kind]
    rows = [row("plain" if kind == "csv" else "explicit", i) for i in range(12)]
    if kind != "csv":
        rows = [
            {name: entry[name] for name in ("prompt", "chosen", "rejected")} | {"rejected": entry["rejected"][0]}
            for entry in rows
        ]
    write(whole := tmp_path / f"whole.{suffix}", rows)
    assert len(load(whole, tokenizers[0])) == 12
    content, refused = whole.read_bytes(), 0
    broken = [b"", b"\n", *(change(content, generator) for change in BREAKS * 3)]
    for number, damaged in enumerate(broken):
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(damaged)
        found = outcome(path, tokenizers[0])
        if isinstance(found, str):
            assert str(path) in found, found
            refused += 1
        else:
            assert found.report.rows_kept + found.report.rows_rejected == found.report.rows_read
    assert refused >= 12
