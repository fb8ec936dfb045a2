"""The UltraFeedback subset: its rule, its manifest, the same bytes from every kind of source, and its errors."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_ultrafeedback_preferences as prepare
from relax.errors import UserError
from tests.unit.data.samples import assistant, user, write_jsonl

FILES = [f"ultrafeedback_{name}.{kind}" for name in ("train", "eval") for kind in ("jsonl", "parquet")]


def row(prompt_id: str, *, chosen: str = "good", rejected: str = "bad", question: str | None = None) -> dict[str, Any]:
    prompt = f"Question {prompt_id}"
    return {
        "prompt": prompt,
        "prompt_id": prompt_id,
        "chosen": [user(prompt), assistant(chosen)],
        "rejected": [user(question or prompt), assistant(rejected)],
        "messages": [user(prompt), assistant(chosen)],
        "score_chosen": 8.0,
        "score_rejected": 4.5,
    }


TRAIN = [row(f"t{i}") for i in range(12)]
TEST = [row(f"e{i}") for i in range(6)]


def write_source(directory: Path, train: list[Any] = TRAIN, test: list[Any] = TEST) -> Path:
    directory.mkdir()
    for split, rows in (("train_prefs", train), ("test_prefs", test), ("train_sft", [{"text": "other"}])):
        write_jsonl(directory / f"{split}-00000.jsonl", rows)
    return directory


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: object) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["prepare", "--output-dir", str(output), *map(str, flags)])
    prepare.main()
    return json.loads((output / "manifest.json").read_text())


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_order(ids: list[str]) -> list[str]:
    return sorted(ids, key=lambda i: hashlib.sha256(f"task31-ultrafeedback-v1:{i}".encode()).hexdigest())


def test_the_subset_is_the_head_of_the_fixed_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_source(tmp_path / "source")
    manifest = run(monkeypatch, tmp_path / "out", "--source", source, "--train-size", 5, "--eval-size", 3)
    ids = {"train": in_order([f"t{i}" for i in range(12)])[:5], "eval": in_order([f"e{i}" for i in range(6)])[:3]}
    for name, split in (("train", "train_prefs"), ("eval", "test_prefs")):
        rows = read(tmp_path / "out" / f"ultrafeedback_{name}.jsonl")
        assert [entry["prompt_id"] for entry in rows] == ids[name] == manifest["outputs"][name]["prompt_ids"]
        assert rows[0] == {
            "prompt_id": ids[name][0],
            "chosen": [user(f"Question {ids[name][0]}"), assistant("good")],
            "rejected": [user(f"Question {ids[name][0]}"), assistant("bad")],
            "metadata": {"source_split": split, "score_chosen": 8.0, "score_rejected": 4.5},
        }
        assert pq.read_table(tmp_path / "out" / f"ultrafeedback_{name}.parquet").to_pylist() == rows
        for kind in ("jsonl", "parquet"):
            entry = manifest["outputs"][name][kind]
            assert entry["sha256"] == hashlib.sha256((tmp_path / "out" / entry["path"]).read_bytes()).hexdigest()
    assert manifest["source"]["revision"] == "3949bf5f8c17c394422ccfab0c31ea9c20bdeb85"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, "manifest.json"])


def test_bad_rows_are_replaced_by_the_next_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bad = [
        row("t0", chosen="late"),  # a second occurrence: the first wins
        {**row("schema1"), "chosen": "text"},
        {**row("schema2"), "rejected": [user("Question schema2")]},
        row("mismatch", question="other"),
        row("identical", chosen="bad"),
        {**row("none"), "prompt_id": None},
        ["no", "object"],
    ]
    source = write_source(tmp_path / "source", train=[*TRAIN, *bad], test=[*TEST, row("t3")])
    flags = ("--source", source, "--train-size", 12, "--eval-size", 6)
    manifest = run(monkeypatch, tmp_path / "out", *flags)
    assert manifest["outputs"]["train"]["prompt_ids"] == in_order([f"t{i}" for i in range(12)])
    assert manifest["outputs"]["eval"]["prompt_ids"] == in_order([f"e{i}" for i in range(6)])
    train, evaluation = manifest["rejections"]["train"], manifest["rejections"]["eval"]
    assert train["counts"] == {"duplicate": 1, "identical": 1, "prompt_mismatch": 1, "schema": 4}
    assert [(entry["source_index"], entry["code"]) for entry in train["rows"]] == [
        (12, "duplicate"), (13, "schema"), (14, "schema"), (15, "prompt_mismatch"), (16, "identical"), (17, "schema"),
        (18, "schema"),
    ]  # fmt: skip
    assert evaluation["rows"] == [
        {"source_index": 6, "prompt_id": "t3", "code": "duplicate", "reason": "the prompt_id is in the training subset"}
    ]


def test_every_source_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clone = tmp_path / "clone"
    (clone / "data").mkdir(parents=True)
    splits = {"train_prefs": TRAIN, "test_prefs": TEST}
    for split, rows in splits.items():
        pq.write_table(pa.Table.from_pylist(rows), clone / "data" / f"{split}-00000-of-00001.parquet")
    datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}).save_to_disk(
        tmp_path / "saved"
    )
    lines = write_source(tmp_path / "lines")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, revision, split: splits[split])
    sources = {"clone": [clone], "saved": [tmp_path / "saved"], "files": sorted(lines.glob("*_prefs*")), "hub": []}
    outputs = []
    for name, paths in sources.items():
        flags = ("--source", *paths) if paths else ()
        run(monkeypatch, tmp_path / name, *flags, "--train-size", 5, "--eval-size", 3)
        outputs.append([(tmp_path / name / file).read_bytes() for file in FILES])
    assert all(output == outputs[0] for output in outputs)


def test_sources_that_cannot_serve_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_source(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[list[object], str]] = [
        (["--source", tmp_path / "gone"], "--source .*gone: no such file or directory"),
        (["--source", tmp_path / "empty"], "no file of the split train_prefs"),
        (["--source", source], "train_prefs has 12 valid rows and 0 others, but --train-size asks for 4096"),
        (["--source", source, "--train-size", 5], "test_prefs has 6 valid rows and 0 others, but --eval-size asks"),
        (["--source", source, "--train-size", 0], "--train-size: must be a whole number, at least 1"),
    ]
    for flags, message in cases:
        with pytest.raises(UserError, match=message):
            run(monkeypatch, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output-dir .*file: cannot be written"):
        run(monkeypatch, tmp_path / "file", "--source", source, "--train-size", 5, "--eval-size", 3)


def test_a_hub_failure_names_the_source_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="cannot be read from the Hugging Face hub: no route to host. .* with --source"):
        run(monkeypatch, tmp_path / "out")
