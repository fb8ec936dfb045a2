"""Rows in every published shape: training from the rows gives the pairs of the prefix that `relax.preprocess` makes of them,
whichever row comes first.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.backend import indexed
from relax.data import DataOptions, GroupDataset, load_pairs
from relax.data.preprocessing import Settings, preprocess
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError
from relax.preprocess import TEMPLATES
from tests.unit.data.samples import QWEN3, assistant, build_tokenizer, chat_row, user, write_jsonl

SYSTEM = "You are a quiet night bird of silver."
PAIR = {"chosen": "blue stone", "rejected": "no"}
PAIRWISE, SHAREGPT, PREFERENCE = "AlpacaStylePairwiseHandler", "SharegptStylePairwiseHandler", "PreferencePairHandler"


def human(text: str) -> str:
    return f"\n\nHuman: {text}\n\nAssistant:"


def six(row: Any) -> list[dict[str, Any]]:
    return [row(i) for i in range(1, 7)]


# shape: (handler, its rows, the odd row, whether that one is kept, training's key map, map_keys)
SHAPES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], bool, dict[str, str], dict[str, str]]] = {
    "messages": (PREFERENCE, six(lambda i: chat_row(f"Q{i}", "Yes", "No")), {"prompt": "Q0", **PAIR}, False, {}, {}),
    "ultrafeedback": (
        PREFERENCE,
        six(lambda i: {"prompt": f"Q{i}", **chat_row(f"Q{i}", "Yes", "No")}),
        {"prompt": "Q0", **PAIR},
        False,
        {},
        {},
    ),
    "messages with a system column": (
        PREFERENCE,
        six(lambda i: {"system": SYSTEM, **chat_row(f"Q{i}", "Yes", "No")}),
        {"system": "", **chat_row("Q0", "Yes", "No")},
        True,
        {},
        {},
    ),
    "prompt text": (PREFERENCE, six(lambda i: {"prompt": f"Q{i}", **PAIR}), {"prompt": [user("Q0")], **PAIR}, True, {}, {}),
    "prompt messages": (
        PREFERENCE,
        six(lambda i: {"prompt": [user(f"Q{i}")], "chosen": [assistant("Yes")], "rejected": [assistant("No")]}),
        {"prompt": "Q0", **PAIR},
        True,
        {},
        {},
    ),
    "orca": (
        PAIRWISE,
        six(lambda i: {"system": SYSTEM, "question": f"Q{i}", **PAIR}),
        {"system": "", "question": "Q0", **PAIR},
        True,
        {"system": "system", "question": "prompt"},
        {"prompt": "question", "query": "", "system": "system"},
    ),
    "one system prompt in many": (
        PAIRWISE,
        six(lambda i: {"system": "", "question": f"Q{i}", **PAIR}),
        {"system": SYSTEM, "question": "Q0", **PAIR},
        True,
        {},
        {"prompt": "question", "system": "system"},
    ),
    "alpaca": (
        PAIRWISE,
        six(lambda i: {"instruction": "Do", "input": f"it {i}", "history": [["Hi", "Hello"]], **PAIR}),
        {"instruction": "Do it", "input": "", "history": [], **PAIR},
        True,
        {},
        {"prompt": "instruction", "query": "input", "history": "history"},
    ),
    "input alone": (
        PAIRWISE,
        six(lambda i: {"system": SYSTEM, "input": f"Q{i}", **PAIR}),
        {"system": None, "input": "Q0", **PAIR},
        True,
        {},
        {"query": "input"},
    ),
    "sharegpt": (
        SHAREGPT,
        six(lambda i: {"conversations": [{"from": "human", "value": f"Q{i}"}], "chosen": {"from": "gpt", "value": "Yes"},
                       "rejected": {"from": "gpt", "value": "No"}}),
        {"conversations": None, "prompt": "Q0", **PAIR},
        False,
        {},
        {},
    ),
    "sharegpt with a system column": (
        SHAREGPT,
        six(lambda i: {"system": SYSTEM, "conversations": [{"from": "human", "value": f"Q{i}"}], **PAIR}),
        {"system": "", "conversations": [{"from": "human", "value": "Q0"}], **PAIR},
        True,
        {},
        {},
    ),
    "dialogue": (
        PREFERENCE,
        six(lambda i: {"chosen": human(f"Q{i}") + " Yes", "rejected": human(f"Q{i}") + " No"}),
        {"chosen": "Yes", "rejected": "No"},
        False,
        {},
        {},
    ),
    "dialogue behind a prompt": (
        PREFERENCE,
        six(lambda i: {"prompt": human(f"Q{i}"), "chosen": " Yes", "rejected": " No"}),
        {"prompt": "Q0", "chosen": " Yes", "rejected": " No"},
        False,
        {},
        {},
    ),
    "prompts among which one is a dialogue": (
        PREFERENCE,
        six(lambda i: {"prompt": f"Q{i}", "chosen": " Yes", "rejected": " No"}),
        {"prompt": human("Q0"), "chosen": " Yes", "rejected": " No"},
        False,
        {},
        {},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("qwen3"), template=QWEN3)


def tokenize(path: Path, tokenizer: Path, *, prefix: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "input": [str(path)],
        "tokenizer_name_or_path": str(tokenizer),
        "output_prefix": str(prefix),
        "seq_length": None,
        "prompt_type": "auto",
        "prompt_type_path": TEMPLATES,
        "enable_thinking": None,
        "workers": 1,
    }
    preprocess(Settings(**{**values, **changes}), indexed=indexed, progress=lambda done, total: None)
    return prefix


def load(path: Path, tokenizer: Path, **options: Any) -> GroupDataset:
    return load_pairs(
        [str(path)],
        tokenizer_dir=tokenizer,
        options=DataOptions(**options),
        cache_dir=path.parent / "cache",
        num_workers=1,
        title="train",
        indexed=indexed,
    )


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_raw_rows_give_the_prefix_whichever_row_is_first(tmp_path: Path, tokenizer_dir: Path, shape: str, place: int):
    handler, rows, odd, kept, key_map, map_keys = SHAPES[shape]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows[:place], odd, *rows[place:]])
    raw = load(path, tokenizer_dir, conversation_key_map=key_map)
    prefix = tokenize(path, tokenizer_dir, prefix=tmp_path / "t", handler_name=handler, map_keys=map_keys)
    from_prefix = load(prefix, tokenizer_dir)
    assert raw.fingerprint == from_prefix.fingerprint and len(raw) == 6 + kept
    for a, b in zip(raw, from_prefix, strict=True):
        assert all(map(np.array_equal, (a.prompt, *a.completions), (b.prompt, *b.completions)))
    # The rows alone: the odd one changed nothing about the others.
    alone = load(write_jsonl(tmp_path / "b.jsonl", rows), tokenizer_dir, conversation_key_map=key_map)
    others = [i for i in range(len(raw)) if not kept or i != place]
    assert np.array_equal(raw.hashes[others], alone.hashes)
    prompts = [load_tokenizer(tokenizer_dir).decode(pair.prompt) for pair in raw]
    has_system = [bool(row.get("system")) for row in [*rows[:place], *([odd] if kept else []), *rows[place:]]]
    assert [prompt.count(SYSTEM) for prompt in prompts] == has_system
    if not kept:
        (where,) = raw.report.to_json()["rejected"]["schema"]["rows"]
        assert where == f"{path}:{place + 1}"


@pytest.mark.parametrize(
    ("shape", "handler"),
    [("orca", SHAREGPT), ("orca", PREFERENCE), ("sharegpt", PREFERENCE), ("ultrafeedback", PAIRWISE),
     ("dialogue behind a prompt", PAIRWISE)],
)  # fmt: skip
def test_a_handler_of_another_format_is_refused(tmp_path: Path, tokenizer_dir: Path, shape: str, handler: str):
    path = write_jsonl(tmp_path / "a.jsonl", [{"conversations": None, **row} for row in SHAPES[shape][1]])
    with pytest.raises(UserError, match="a.jsonl: its rows are .*, and this handler_name reads .*: choose another handler"):
        tokenize(path, tokenizer_dir, prefix=tmp_path / "t", handler_name=handler, map_keys={})


def test_the_format_is_that_of_most_rows_however_long_the_file(tmp_path: Path, tokenizer_dir: Path):
    odd = [{"prompt": f"P{i}", **PAIR} for i in range(600)]
    path = write_jsonl(tmp_path / "a.jsonl", [*odd, *(chat_row(f"Q{i}", "Yes", "No") for i in range(900))])
    report = load(path, tokenizer_dir).report
    assert report.files[0].format == "implicit_prompt" and report.rows_kept == 900
    assert report.rejected["schema"].details[0] == "the row is explicit_prompt, and most rows of its file are implicit_prompt"


def test_rows_as_they_are(tmp_path: Path, tokenizer_dir: Path):
    header = "<|im_start|>user\nQ{}<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"prompt": header.format(i), "chosen": "Yes<|im_end|>\n", "rejected": "No"} for i in range(4)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prefix = tokenize(path, tokenizer_dir, prefix=tmp_path / "t", handler_name=PREFERENCE, map_keys={}, prompt_type="none")
    decode = load_tokenizer(tokenizer_dir).decode
    for whole, end in ((False, ""), (True, "\n")):
        raw = load(path, tokenizer_dir, chat_template=False, whole_render=whole)
        assert decode(raw[0].prompt) == header.format(0)
        assert (decode(raw[0].completions[0]), decode(raw[0].completions[1])) == (f"Yes<|im_end|>{end}", "No<|im_end|>")
        for options in ({}, {"chat_template": False}):
            assert load(prefix, tokenizer_dir, whole_render=whole, **options).fingerprint == raw.fingerprint
    plain = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"Q{i}", **PAIR} for i in range(4)])
    auto = tokenize(plain, tokenizer_dir, prefix=tmp_path / "u", handler_name=PREFERENCE, map_keys={})
    with pytest.raises(UserError, match="was rendered with the template .{16} .prompt_type auto., and --no-chat-template asks"):
        load(auto, tokenizer_dir, chat_template=False)
    with pytest.raises(UserError, match="enable_thinking: the template of prompt_type none"):
        tokenize(plain, tokenizer_dir, prefix=tmp_path / "v", handler_name=PREFERENCE, map_keys={}, prompt_type="none",
                 enable_thinking=True)  # fmt: skip
