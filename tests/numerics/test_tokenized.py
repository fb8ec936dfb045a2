"""Tokenized prefixes: the pairs of the raw rows, MindSpeed-RL's files, and one message for what does not belong together."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from relax.backend import indexed
from relax.data import DataOptions, DataReport, GroupDataset, load_pairs, pipeline
from relax.data.data_report import FileSummary, OneByOne
from relax.data.dataset import GroupBlock
from relax.data.pipeline import Collector
from relax.data.prefix import PAIR_FIELDS, field_path, sidecar_path
from relax.data.preprocessing import Settings, preprocess
from relax.data.tokenized_writer import TokenizedWriter
from relax.data.tokenizer import load_tokenizer
from relax.data.worker import ChunkResult, Rejection
from relax.errors import UserError
from relax.preprocess import TEMPLATES
from tests.unit.data.samples import LLAMA, QWEN3, assistant, build_tokenizer, chat_row, user, write_jsonl

LONG = "one two three four five six seven eight nine ten"
ROWS = [
    *(chat_row(f"Question {i}? {LONG[: 5 * i]}", f"Yes {i} {LONG[: 3 * i]}", f"No {i}") for i in range(12)),
    {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
     "rejected": [user("a"), assistant("b"), user("c"), assistant("e")]},
    chat_row("Q", "A", "A"),
    chat_row("Question 0? ", "Yes 0 ", "No 0"),
    {"chosen": "bad", "rejected": "row"},
    chat_row("Sum (", "46", "$46"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    build_tokenizer(root / "chatml")
    build_tokenizer(root / "qwen3", template=QWEN3)
    build_tokenizer(root / "llama", template=LLAMA, bos="<s>", eos="</s>", adds_bos=True)
    build_tokenizer(root / "plain", template=None, bos="<s>", eos="</s>", adds_bos=True)
    return root


def tokenize(path: Path | list[Path], tokenizer: Path, *, prefix: Path, **changes: Any) -> DataReport:
    """`preprocess` of primary-format rows with the tokenizer's own template."""
    values: dict[str, Any] = {
        "input": [str(file) for file in (path if isinstance(path, list) else [path])],
        "tokenizer_name_or_path": str(tokenizer),
        "output_prefix": str(prefix),
        "handler_name": "PreferencePairHandler",
        "map_keys": {},
        "seq_length": None,
        "prompt_type": "auto",
        "prompt_type_path": TEMPLATES,
        "enable_thinking": None,
        "workers": 1,
    }
    return preprocess(Settings(**{**values, **changes}), indexed=indexed, progress=lambda done, total: None)


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


def read(prefix: Path, field: str) -> list[list[int]]:
    return [row.tolist() for row in IndexedDataset(field_path(prefix, field))]


def same(a: GroupDataset, b: GroupDataset) -> bool:
    pairs = zip(a, b, strict=True)
    parts = all(
        np.array_equal(one, other)
        for x, y in pairs
        for one, other in zip((x.prompt, *x.completions), (y.prompt, *y.completions), strict=True)
    )
    return parts and a.fingerprint == b.fingerprint and np.array_equal(a.hashes, b.hashes)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama", "plain"])
def test_a_prefix_gives_the_pairs_of_its_rows(tmp_path: Path, tokenizers: Path, name: str):
    rows = [{"prompt": f"Q{i} (", "chosen": f"{i}", "rejected": f"${i}"} for i in range(8)] if name == "plain" else ROWS
    raw, prefix = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "tokenized"
    report = tokenize(raw, tokenizers / name, prefix=prefix)
    small = {"max_length": 24, "max_completion_length": 7, "max_tokens": 40}
    for options in (
        {},
        small,
        {**small, "oversize_strategy": "truncate_left"},
        {"whole_render": True},
        {**small, "whole_render": True},
    ):
        from_rows, from_prefix = (load(path, tokenizers / name, **options) for path in (raw, prefix))
        assert same(from_rows, from_prefix)
        assert from_prefix.report.files[0].format == "tokenized" and from_prefix.report.rows_kept == report.rows_kept
        cut = {mark: count for mark, count in from_rows.report.marks.items() if mark != "prompt_shrunk"}
        assert {mark: from_prefix.report.marks[mark] for mark in cut} == cut
        assert {code: len(rejected.rows) for code, rejected in from_rows.report.rejected.items()} == {
            code: len(rejected.rows) for code, rejected in report.rejected.items()
        }


def test_the_files_on_disk(tmp_path: Path, tokenizers: Path):
    raw, prefix = write_jsonl(tmp_path / "a.jsonl", ROWS[:3]), tmp_path / "new" / "t"
    tokenize(raw, tokenizers / "chatml", prefix=prefix, seq_length=100)
    tokenizer = load_tokenizer(tokenizers / "chatml")
    assert sorted(path.name for path in prefix.parent.iterdir()) == sorted(
        ["t_packed.json", *(f"t_packed_{field}_document.{kind}" for field in PAIR_FIELDS for kind in ("bin", "idx"))]
    )
    ids, labels = read(prefix, "chosen_input_ids"), read(prefix, "chosen_labels")
    text = tokenizer.apply_chat_template(ROWS[1]["chosen"], tokenize=False)
    assert tokenizer.decode(ids[1]) == text
    trained = [token for token in labels[1] if token != -100]
    assert tokenizer.decode(trained) == "Yes 1 one<|im_end|>"
    start = len(ids[1]) - 1 - len(trained)  # the newline behind the end token is no label
    assert labels[1] == [-100] * start + ids[1][start:-1] + [-100]
    assert IndexedDataset(field_path(prefix, "rejected_labels")).index.dtype == np.int32
    sidecar = json.loads(sidecar_path(prefix).read_text())
    assert (sidecar["num_pairs"], sidecar["seq_length"], sidecar["handler_name"]) == (3, 100, "PreferencePairHandler")
    assert sidecar["tokenizer"]["path"] == str(tokenizers / "chatml") and sidecar["tokenizer"]["size"] == len(tokenizer)
    assert sidecar["template"]["prompt_type"] == "auto" and len(sidecar["template"]["sha256"]) == 64
    assert sidecar["report"]["rows_kept"] == 3 and len(sidecar["files"]) == 8


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, tokenizers: Path, monkeypatch: pytest.MonkeyPatch):
    raw = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"Q{i % 500}", f"A{i}", "B") for i in range(600)])
    monkeypatch.setattr(pipeline, "MIN_ROWS_FOR_POOL", 1)
    for workers in (1, 2):
        tokenize(raw, tokenizers / "chatml", prefix=tmp_path / str(workers) / "t", workers=workers)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "12")
    assert len(one) == 9 and one == two


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_the_files_are_those_of_megatrons_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr(indexed, "_BLOCK", block)
    ours, theirs = indexed.create_field(str(tmp_path / "ours")), IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.int32)
    for length in (3, 1, 4, 1, 5, 9, 2):
        ids = np.arange(length, dtype=np.int32) * 70_000
        ours.add(ids)
        theirs.add_document(ids, [length])
    ours.finish()
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


def chunk(first: int) -> ChunkResult:
    """500 rows from row `first`: half of them pairs of the same three short parts, half refused."""
    pairs = GroupBlock(
        tokens=np.tile(np.array([1, 2, 3, 4], np.int32), 250),
        lengths=np.tile(np.array([2, 1, 1], np.int32), (250, 1)),
        trained=np.ones((250, 2), np.int32),
        hashes=np.zeros((250, 16), np.uint8),
    )
    return ChunkResult(
        file=0,
        groups=pairs,
        numbers=list(range(first, first + 500, 2)),
        marks=np.zeros(250, np.uint8),
        keys=[[number.to_bytes(16, "big")] for number in range(first, first + 500, 2)],
        rejections=[Rejection(number, "identical", "equal") for number in range(first + 1, first + 500, 2)],
        unused_columns={},
    )


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is kept of 20,000 rows, half of them refused, and writing the index and the report takes less than they are."""
    monkeypatch.setattr(indexed, "_BLOCK", 1000)
    rows = 20_000
    with TokenizedWriter(tmp_path / "t", indexed=indexed, instructions=False) as writer:
        collector = Collector(writer, files=(FileSummary("a.jsonl", "implicit_prompt", 2 * rows),), options=DataOptions())
        for first in range(1, rows, 500):
            collector.add(chunk(first))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for first in range(1 + rows, 2 * rows, 500):
            collector.add(chunk(first))
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.reset_peak()
        writer.publish({"report": collector.report("t").to_json(rows=OneByOne)})
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    assert kept < 100_000 and peak < 700_000, (kept, peak)
    sidecar = json.loads(sidecar_path(tmp_path / "t").read_text())
    assert sidecar["num_pairs"] == rows and sidecar["report"]["tokens"]["total"] == {
        "min": 6, "mean": 6, "p50": 6, "p90": 6, "p99": 6, "max": 6, "sum": 6 * rows
    }  # fmt: skip
    refused = sidecar["report"]["rejected"]["identical"]
    assert refused["count"] == rows and refused["rows"] == [f"a.jsonl:{number}" for number in range(2, 2 * rows + 1, 2)]
    assert len(IndexedDataset(field_path(tmp_path / "t", "rejected_labels"))) == rows


def test_what_is_interrupted_leaves_the_older_files(tmp_path: Path, tokenizers: Path, monkeypatch: pytest.MonkeyPatch):
    raw, prefix = write_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "out" / "t"
    add = TokenizedWriter.add

    def interrupted(writer: TokenizedWriter, pairs: Any) -> None:
        add(writer, pairs)
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenizedWriter, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(raw, tokenizers / "chatml", prefix=prefix)
    assert list(prefix.parent.iterdir()) == []
    monkeypatch.undo()
    tokenize(raw, tokenizers / "chatml", prefix=prefix)
    before = {file.name: file.read_bytes() for file in prefix.parent.iterdir()}
    monkeypatch.setattr(TokenizedWriter, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(write_jsonl(raw, ROWS[:4]), tokenizers / "qwen3", prefix=prefix)
    assert {file.name: file.read_bytes() for file in prefix.parent.iterdir()} == before
    monkeypatch.undo()
    tokenize(raw, tokenizers / "chatml", prefix=prefix)
    assert len(load(prefix, tokenizers / "chatml")) == 4
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output_prefix .*file/t: cannot be written: "):
        tokenize(raw, tokenizers / "chatml", prefix=tmp_path / "file" / "t")


def mindspeed(prefix: Path, pairs: list[tuple[list[int], list[int], list[int]]], **changes: Any) -> Path:
    """A prefix as MindSpeed-RL writes one: no sidecar, one document for several rows, labels over the whole answer."""
    rows = {
        "chosen_input_ids": [p + c for p, c, _ in pairs],
        "chosen_labels": [[-100] * len(p) + c for p, c, _ in pairs],
        "rejected_input_ids": [p + r for p, _, r in pairs],
        "rejected_labels": [[-100] * len(p) + r for p, _, r in pairs],
    }
    for field, sequences in {**rows, **changes}.items():
        builder = IndexedDatasetBuilder(f"{field_path(prefix, field)}.bin")
        for sequence in sequences:
            builder.add_item(torch.IntTensor(sequence))
        builder.end_document()
        builder.finalize(f"{field_path(prefix, field)}.idx")
    return prefix


PAIRS = [([1, 2, 3], [4, 5], [6]), ([7], [8], [9, 10]), ([1, 2, 3], [4, 5], [6]), ([1], [2], [3])]


def test_files_of_mindspeed_rl(tmp_path: Path, tokenizers: Path):
    data = load(mindspeed(tmp_path / "orca_rlhf", PAIRS), tokenizers / "chatml")
    assert [tuple(part.tolist() for part in (pair.prompt, *pair.completions)) for pair in data] == [
        PAIRS[0], PAIRS[1], PAIRS[3]
    ]  # fmt: skip
    assert data.report.to_json()["rejected"]["duplicate"]["rows"] == [f"{tmp_path / 'orca_rlhf'}:3"]
    assert data.max_token_id == 10 and data.columns == {}
    assert "orca_rlhf: tokenized, no sidecar to check it by, 4 rows" in data.report.table()
    raw = write_jsonl(tmp_path / "more.jsonl", ROWS[:2])
    both = load_pairs(
        [str(tmp_path / "orca_rlhf"), str(raw)],
        tokenizer_dir=tokenizers / "chatml",
        options=DataOptions(),
        cache_dir=tmp_path / "cache",
        num_workers=1,
        title="train",
        indexed=indexed,
    )
    assert len(both) == 5 and both[0].completions[0].tolist() == [4, 5]


def test_rows_that_hold_no_pair(tmp_path: Path, tokenizers: Path):
    pairs = [*PAIRS[:2], ([5], [6], [7]), ([8], [9], [10]), ([11], [12], [13]), ([14], [15], [16]), ([], [1], [2])]
    good = mindspeed(tmp_path / "good", pairs)
    labels = read(good, "chosen_labels")
    labels[2] = [-100, -100]
    labels[3] = [-100, 10]  # shifted by one, as Megatron's own labels are
    labels[4] = [-100, 12, 13]
    ids = read(good, "rejected_input_ids")
    ids[5][0] = 99
    more = [([20 + i], [30 + i], [40 + i]) for i in range(8)]
    labels += [[-100, c[0]] for _, c, _ in more]
    ids += [p + r for p, _, r in more]
    data = load(mindspeed(tmp_path / "bad", pairs + more, chosen_labels=labels, rejected_input_ids=ids), tokenizers / "chatml")
    rejected = data.report.to_json()["rejected"]
    assert {code: [row.rpartition(":")[2] for row in entry["rows"]] for code, entry in rejected.items()} == {
        "schema": ["4", "5"],
        "prompt_mismatch": ["6", "7"],
        "empty_completion": ["3"],
    }
    assert [example["detail"] for example in rejected["schema"]["examples"]] == [
        "the labels of chosen are not the ids of one answer",
        "chosen has 2 ids and 3 labels",
    ]
    assert len(data) == 10


@pytest.fixture
def made(tmp_path: Path, tokenizers: Path) -> Path:
    """A prefix of the chatml tokenizer."""
    tokenize(write_jsonl(tmp_path / "a.jsonl", ROWS), tokenizers / "chatml", prefix=tmp_path / "t")
    return tmp_path / "t"


def test_another_tokenizer_is_an_error_that_names_both(made: Path, tokenizers: Path):
    other = tokenizers.parent / "other"
    shutil.copytree(tokenizers / "chatml", other, dirs_exist_ok=True)
    assert len(load(made, other)) == 14  # the same vocabulary in another place
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError) as error:
        load(made, other)
    assert str(error.value).startswith(f"{made} was tokenized with {tokenizers / 'chatml'} (")
    assert f"but --hf-checkpoint gives {other} (" in str(error.value)


def test_another_template_is_an_error_that_names_both(made: Path, tokenizers: Path):
    with pytest.raises(UserError, match="was rendered with the template .{16} .prompt_type auto., but --hf-checkpoint gives"):
        load(made, build_tokenizer(made.parent / "templated", template=LLAMA))
    with pytest.raises(
        UserError, match=r'gives the template .{16} .prompt_type auto. and {"enable_thinking": false}. .*flag out'
    ):
        load(made, tokenizers / "chatml", chat_template_kwargs={"enable_thinking": False})
    thinking = made.with_name("thinking")
    rows = write_jsonl(made.parent / "b.jsonl", ROWS)
    with pytest.raises(UserError, match="enable_thinking: the template of prompt_type auto does not read it"):
        tokenize(rows, tokenizers / "chatml", prefix=thinking, enable_thinking=True)
    tokenize(rows, tokenizers / "qwen3", prefix=thinking, enable_thinking=False)
    raw = load(rows, tokenizers / "qwen3", chat_template_kwargs={"enable_thinking": False})
    for kwargs in ({}, {"enable_thinking": False}):
        assert same(load(thinking, tokenizers / "qwen3", chat_template_kwargs=kwargs), raw)
    with pytest.raises(UserError, match=r'and {"enable_thinking": false}, but --apply-chat-template-kwargs gives .*": true}'):
        load(thinking, tokenizers / "qwen3", chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(UserError, match="already rendered; --apply-chat-template-kwargs would have no effect"):
        load(mindspeed(made.parent / "foreign", PAIRS), tokenizers / "chatml", chat_template_kwargs={"enable_thinking": True})


def test_flags_that_would_have_no_effect(made: Path, tokenizers: Path):
    for option, flag in (
        ("system_prompt", "--system-prompt"),
        ("prompt_key", "--prompt-key"),
        ("pair_id_key", "--pair-id-key"),
    ):
        with pytest.raises(UserError, match=f"{made}: already tokenized; {flag} would have no effect on it"):
            load(made, tokenizers / "chatml", **{option: "x"})


def test_files_that_do_not_belong_together(made: Path, tokenizers: Path):
    chosen = Path(f"{field_path(made, 'chosen_labels')}.bin")
    content = chosen.read_bytes()
    chosen.write_bytes(content[:-4] + b"\1\0\0\0")
    with pytest.raises(UserError, match=f"{chosen} has SHA-256 .{{16}}, but t_packed.json says .{{16}}: it is damaged"):
        load(made, tokenizers / "chatml")
    chosen.write_bytes(content[:-4])
    sidecar_path(made).unlink()
    with pytest.raises(UserError, match="t_packed_chosen_labels_document: not Megatron's indexed files, or damaged: the .bin"):
        load(made, tokenizers / "chatml")
    chosen.unlink()
    with pytest.raises(UserError, match="t: a tokenized prefix without t_packed_chosen_labels_document.bin: it is not"):
        load(made, tokenizers / "chatml")
    short = mindspeed(made.with_name("short"), PAIRS, rejected_labels=[[1]])
    with pytest.raises(UserError, match="different numbers of rows: chosen_input_ids 4, .* rejected_labels 1"):
        load(short, tokenizers / "chatml")
    Path(f"{field_path(short, 'rejected_labels')}.idx").write_bytes(b"not an index")
    with pytest.raises(
        UserError, match="short_packed_rejected_labels_document: not Megatron's indexed files, .* another header"
    ):
        load(short, tokenizers / "chatml")
    short.mkdir()
    with pytest.raises(UserError, match="short: the name of a directory and of a tokenized prefix"):
        load(short, tokenizers / "chatml")


def test_negative_token_ids_and_sidecars_that_are_none(tmp_path: Path, made: Path, tokenizers: Path):
    with pytest.raises(UserError, match="n:2: token id -5 is in no vocabulary"):
        load(mindspeed(tmp_path / "n", [PAIRS[0], ([-5], [1], [2])]), tokenizers / "chatml")
    sidecar = json.loads(sidecar_path(made).read_text())
    sidecar_path(made).write_text(json.dumps({**sidecar, "num_pairs": 3}))
    with pytest.raises(UserError, match="t: holds 14 pairs, but t_packed.json says 3"):
        load(made, tokenizers / "chatml")
    broken = [{**sidecar, name: value} for name in ("files", "num_pairs", "template", "tokenizer") for value in (None, [], "x")]
    broken += [{**sidecar, part: {**sidecar[part], name: []}} for part in ("template", "tokenizer") for name in sidecar[part]]
    for text in ("{", "[]", "{}", "[" * 100_000, *map(json.dumps, broken)):
        sidecar_path(made).write_text(text)
        with pytest.raises(UserError, match="t_packed.json: not a sidecar of relax.preprocess"):
            load(made, tokenizers / "chatml")


def test_prefixes_and_rows_in_one_directory(made: Path, tokenizers: Path):
    assert len(load(made.parent, tokenizers / "chatml")) == 14  # the rows; a sidecar is no data file
    with pytest.raises(UserError, match="already tokenized; this command reads rows of text"):
        load_pairs(
            [str(made)],
            tokenizer_dir=tokenizers / "chatml",
            options=DataOptions(),
            cache_dir=made.parent / "x",
            num_workers=1,
            title="train",
        )
    with pytest.raises(UserError, match="input .*/t: already tokenized; give the rows"):
        tokenize(made, tokenizers / "chatml", prefix=made.with_name("u"))


ORCA: dict[str, Any] = {
    "system": "Be brief",
    "question": "What is it?",
    "input": "one\ntwo",
    "chosen": "A",
    "rejected": "B",
    "history": [["a", "b"]],
}


def test_alpaca_pairs(tmp_path: Path, tokenizers: Path):
    raw = write_jsonl(tmp_path / "a.jsonl", [ORCA, {**ORCA, "system": "", "input": "", "history": None}])
    head = "<|im_start|>system\nBe {}<|im_end|>\n"
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    question = "<|im_start|>user\nWhat is it?{}<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    expected = {
        "all": head.format("brief") + turns + question.format("\none\ntwo"),
        "no query": head.format("brief") + turns + question.format(""),
        "no system": head.format("helpful") + turns + question.format("\none\ntwo"),
    }
    maps = {"all": {}, "no query": {"query": ""}, "no system": {"system": "", "prompt": "question"}}
    tokenizer = load_tokenizer(tokenizers / "chatml")
    for name, map_keys in maps.items():
        prefix = tmp_path / name.replace(" ", "_")
        tokenize(raw, tokenizers / "chatml", prefix=prefix, handler_name="AlpacaStylePairwiseHandler", map_keys=map_keys)
        first, second = read(prefix, "chosen_input_ids")
        assert tokenizer.decode(first) == expected[name]
        assert tokenizer.decode(second) == head.format("helpful") + question.format("")


def test_instructions(tmp_path: Path, tokenizers: Path):
    row = {"instruction": "Add (", "input": "1, 2", "output": "3", "history": [["a", "b"]], "system": "S"}
    raw = write_jsonl(tmp_path / "a.jsonl", [row, {**row, "output": " "}, {**row, "history": [], "output": "4"}, row])
    report = tokenize(
        raw, tokenizers / "chatml", prefix=tmp_path / "t", handler_name="AlpacaStyleInstructionHandler", prompt_type="chatml"
    )
    assert {code: len(rejected.rows) for code, rejected in report.rejected.items()} == {"empty_completion": 1, "duplicate": 1}
    ids, labels, mask = (read(tmp_path / "t", field) for field in ("input_ids", "labels", "attention_mask"))
    tokenizer = load_tokenizer(tokenizers / "chatml")
    assert tokenizer.decode(ids[1]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAdd (\n1, 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    assert tokenizer.decode([token for token in labels[0] if token != -100]) == "3<|im_end|>"
    assert mask == [[1] * len(row) for row in ids] and [len(row) for row in labels] == [len(row) for row in ids]
    with pytest.raises(UserError, match="t: a tokenized prefix without .*: it holds instructions, and training needs pairs"):
        load(tmp_path / "t", tokenizers / "chatml")
    plain = write_jsonl(tmp_path / "p.jsonl", [{"instruction": "Add", "output": "3"}])
    tokenize(plain, tokenizers / "plain", prefix=tmp_path / "p", handler_name="AlpacaStyleInstructionHandler")
    assert load_tokenizer(tokenizers / "plain").decode(read(tmp_path / "p", "input_ids")[0]) == "<s>Add3</s>"


def test_sharegpt_pairs(tmp_path: Path, tokenizers: Path):
    row = {"conversations": [{"from": "human", "value": "Hi"}], "chosen": {"from": "gpt", "value": "A"}, "rejected": "B"}
    raw = write_jsonl(tmp_path / "a.jsonl", [row])
    tokenize(raw, tokenizers / "chatml", prefix=tmp_path / "t", handler_name="SharegptStylePairwiseHandler")
    assert same(load(tmp_path / "t", tokenizers / "chatml"), load(raw, tokenizers / "chatml"))


def test_sides_longer_than_seq_length_are_dropped_and_counted(tmp_path: Path, tokenizers: Path):
    raw = write_jsonl(tmp_path / "a.jsonl", ROWS[:12])
    tokenize(raw, tokenizers / "chatml", prefix=tmp_path / "all")
    sides = (map(len, read(tmp_path / "all", f"{side}_input_ids")) for side in ("chosen", "rejected"))
    longest = list(map(max, *sides))
    limit = sorted(longest)[6]
    report = tokenize(raw, tokenizers / "chatml", prefix=tmp_path / "t", seq_length=limit)
    kept = [length for length in longest if length <= limit]
    assert report.rows_kept == len(kept) == IndexedDataset(field_path(tmp_path / "t", "chosen_labels")).index.sequence_count
    assert len(report.rejected["oversize"].rows) == 12 - len(kept) > 0 and report.rows_bad == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"handler_name": "AlpacaHandler"}, "handler_name 'AlpacaHandler' is unknown; there are: AlpacaStylePairwiseHandler, "),
        ({"map_keys": {"promt": "question"}}, "map_keys: AlpacaStylePairwiseHandler reads no 'promt'; it reads: prompt, "),
        ({"map_keys": {"response": "chosen"}}, "map_keys: AlpacaStylePairwiseHandler reads no 'response'"),
        ({"map_keys": {"prompt": "ask"}}, r"a.jsonl: no column 'ask' \(map_keys: prompt\). The file has: chosen, hist"),
        ({"map_keys": {"prompt": "", "query": ""}}, r"no column for prompt or query \(map_keys\). The file has: "),
        ({"handler_name": "AlpacaStyleInstructionHandler"}, r"a.jsonl: no column for response \(map_keys\). The file has: "),
        ({"handler_name": "SharegptStylePairwiseHandler"}, r"no column for conversations \(map_keys\). The file has: "),
        ({"handler_name": "PreferencePairHandler"}, "its rows are alpaca, and this handler_name reads implicit_prompt, "),
        ({"prompt_type": "qwen4"}, "prompt_type 'qwen4' is not in .*; there are: auto, none, default"),
        ({"prompt_type": "llama3"}, "prompt_type llama3 writes <|start_header_id|>"),
    ],
)  # fmt: skip
def test_wrong_names_list_what_exists(tmp_path: Path, tokenizers: Path, changes: dict[str, Any], message: str):
    raw = write_jsonl(tmp_path / "a.jsonl", [ORCA])
    with pytest.raises(UserError, match=message.replace("<|", r"<\|").replace("|>", r"\|>")):
        tokenize(raw, tokenizers / "chatml", prefix=tmp_path / "t", **{"handler_name": "AlpacaStylePairwiseHandler", **changes})
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
