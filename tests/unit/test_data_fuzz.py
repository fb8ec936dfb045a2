"""Rows and files of any content: pairs, rejections or one `UserError`, never another exception.

The mutations are drawn from fixed seeds: a failure names the seed, and running it again fails again.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax.errors import UserError
from tests.unit.data_samples import KINDS, QWEN3, assistant, build_tokenizer, chat_row, load, user, write_kind

ROWS: list[dict[str, Any]] = [
    chat_row("Question?", "Yes", "No", margin=0.5, tools=[{"name": "f"}], chat_template_kwargs={"enable_thinking": False}),
    {"prompt": "Question?", "chosen": "Yes", "rejected": "No", "system": "Be brief", "history": [["a", "b"]], "query": "now"},
    {"prompt": [user("Question?")], "chosen": assistant("Yes"), "rejected": [assistant("No")], "id": 7},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}, "rejected": "B"},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    {
        "prompt": [user("Q"), {**assistant(""), "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
                   {"role": "tool", "content": "3"}],
        "chosen": {**assistant("Yes"), "reasoning_content": "why"},
        "rejected": "No",
    },
]  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = [value] if level % 2 else {"role": "user", "content": value}
    return value


ODD: list[Callable[[], Any]] = [
    lambda: None, lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"), lambda: True, lambda: 0, lambda: -1.5,
    lambda: 10**4299, lambda: 10**400, lambda: "", lambda: " \n", lambda: "\ud800", lambda: "a\udfffb", lambda: "\x00",
    lambda: "nan",
    lambda: "x" * 5000, lambda: "[{", lambda: '[{"role": "user"', lambda: "[{'role': 'user', 'content': 'x'}]",
    lambda: json.dumps([user("a"), assistant("b")]), lambda: json.dumps(assistant("b")), lambda: "[" * 5000, lambda: "9" * 5000,
    lambda: '{"role": "user", "content": ' + "[" * 3000, lambda: [], lambda: {}, lambda: [[]], lambda: [None], lambda: [{}],
    lambda: [user("a")], lambda: [assistant("b")], lambda: nested(70), 
    lambda: {"role": "assistant"}, lambda: {"role": [1], "content": {}}, lambda: {"role": "\ud800", "content": "x"},
    lambda: {"role": "assistant", "content": [{"type": "image"}]}, lambda: {**assistant("x"), "tool_calls": "{"},
    lambda: {**assistant("x"), "tool_calls": [3, {"function": 5}, {"function": {"arguments": [1]}}]},
    lambda: "<|im_start|>user\n", lambda: "\n\nHuman: x\n\nAssistant:", lambda: {"enable_thinking": nested(60)},
    lambda: {"messages": 1}, lambda: {"tokenize": True}, lambda: {"chat_template": "{{ 1 / 0 }}"}, lambda: {"": 1, "\ud800": 2},
]  # fmt: skip


def mutated(row: Any, rng: random.Random) -> Any:
    """The row with up to three of its values, at any depth, replaced, removed, repeated or renamed."""
    row = json.loads(json.dumps(row))
    for _ in range(rng.randint(1, 3)):
        places = list(walk(row))
        if not places:
            break
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["prompt", "chosen", "system", "role", "content", "\udc00", "tools", "margin"])] = holder.pop(key)
        elif kind == 2 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = rng.choice(ODD)()
    return row if rng.random() < 0.97 else rng.choice(ODD)()


def walk(value: Any) -> Any:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from walk(value[key])


PIECES = (b"\0", b"\xff\xfe", b"\n", b'"', b"]", b"9" * 5000, b"[" * 2000, b",", b"NaN")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("qwen3"), template=QWEN3)


def outcome(path: Path, tokenizer: Path, **options: Any) -> str:
    """The fingerprint of the pairs, or the message; whatever else happens fails the test."""
    try:
        data = load(path, tokenizer, **options)
    except UserError as error:
        str(error).encode()  # it can be printed
        return str(error)
    json.dumps(data.report.to_json(), ensure_ascii=False).encode()
    data.report.table().encode()
    return data.fingerprint


@pytest.mark.parametrize("shape", range(len(ROWS)))
def test_mutated_rows(tmp_path: Path, tokenizer_dir: Path, shape: int):
    """A thousand rows in all, in files that hold as many good ones: none stops the others."""
    for seed in range(5):
        rng = random.Random(10 * shape + seed)
        rows = [mutated(ROWS[shape], rng) for _ in range(35)]
        rng.shuffle(rows := [*rows, *[ROWS[shape]] * 40])
        path, array = tmp_path / f"{seed}.jsonl", tmp_path / f"{seed}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        array.write_text(json.dumps(rows))
        pairs = outcome(path, tokenizer_dir)
        assert len(pairs) == 64 and outcome(array, tokenizer_dir) == pairs, f"seed {10 * shape + seed}: {pairs}"
        outcome(path, tokenizer_dir, chat_template=False)
        outcome(path, tokenizer_dir, strict=True, whole_render=True, pair_id_key="id" if "id" in ROWS[shape] else None)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files(tmp_path: Path, tokenizer_dir: Path, kind: str):
    """Sixty files of each kind, with bytes changed, cut off or put in."""
    rows = [chat_row(f"Q{i} é", "Yes", "No", margin=0.5) for i in range(20)]
    whole = write_kind(tmp_path / f"whole{kind}", rows).read_bytes()
    for seed in [*range(60), *([259] if kind == ".arrow" else [])]:  # 259: the name of a column is no UTF-8
        path = tmp_path / f"{seed}{kind}"
        path.write_bytes(damaged(whole, random.Random(seed)))
        outcome(path, tokenizer_dir)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(rng.choice([1, 1, 3, 30])):
        place = rng.randrange(len(content))
        step = rng.randrange(4)
        if step == 0:
            content[place] = rng.randrange(256)
        elif step == 1:
            del content[place : place + rng.choice([1, 8, 1000])]
        elif step == 2:
            content[place:place] = rng.choice(PIECES)
        else:
            content[place] ^= 1 << rng.randrange(8)
    return bytes(content)
