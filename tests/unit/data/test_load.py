"""Loading end to end: the report, the cache, the workers, and one clear message for everything that is wrong."""

import errno
import hashlib
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.data import DataOptions, GroupDataset, dataset, load_pairs, pipeline, scratch, worker
from relax.data import load as load_module
from relax.data.checksums import CHECKSUMS
from relax.data.data_report import DataReport, FileSummary, OneByOne, Rejections, TokenCounts
from relax.data.fingerprint import cache_key
from relax.data.pipeline import ADVICE
from relax.data.rows import REASONS
from relax.data.scratch import whole_file
from relax.data.tokenizer import load_tokenizer
from relax.data.worker import group_hash
from relax.errors import UserError
from tests.unit.data.samples import QWEN3, assistant, build_tokenizer, chat_row, load, user, write_jsonl

ROWS = [chat_row(f"Question {i}?", f"Yes {i}", f"No {i}", margin=float(i)) for i in range(8)]
# One row per reason that a row alone can have, at known lines.
BAD_ROWS: dict[str, tuple[Any, ...]] = {
    "schema": ({"chosen": 1}, ["x"]),
    "prompt_mismatch": ({"chosen": [user("a"), assistant("A")], "rejected": [user("b"), assistant("B")]},),
    "identical": (chat_row("Q", "A", "A"),),
    "empty_completion": (chat_row("Q", "A", ""),),
    "duplicate": (ROWS[0],),
}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def contents(cache: Path) -> dict[str, bytes]:
    (entry,) = entries(cache)
    return {path.name: path.read_bytes() for path in sorted(entry.iterdir())}


def test_pairs_come_back_in_order_with_everything_they_carry(tmp_path: Path, tokenizer_dir: Path):
    data = load(write_jsonl(tmp_path / "a.jsonl", ROWS), tokenizer_dir)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert len(data) == 8
    assert data.lengths.dtype == np.int64 and data.lengths.shape == (8, 3)
    margins = data.columns["margin"]
    assert margins.dtype == np.float32
    for i in (0, 7, 3):
        pair = data[i]
        assert tokenizer.decode(pair.prompt).endswith(f"user\nQuestion {i}?<|im_end|>\n<|im_start|>assistant\n")
        assert tuple(map(tokenizer.decode, pair.completions)) == (
            f"Yes {i}<|im_end|>",
            f"No {i}<|im_end|>",
        )
        assert margins[i] == i
        assert pair.prompt.dtype == np.int32
        assert data.lengths[i].tolist() == [len(pair.prompt), *map(len, pair.completions)]
        assert data.hashes[i].tobytes() == group_hash(pair.prompt, pair.completions)
    assert data.max_token_id == max(int(np.concatenate([p.prompt, *p.completions]).max()) for p in data)
    expected = hashlib.sha256(data.hashes.tobytes() + margins.tobytes()).hexdigest()
    assert data.fingerprint == expected
    for index in (8, -1):
        with pytest.raises(IndexError):
            data[index]


def test_rows_without_margins(tmp_path: Path, tokenizer_dir: Path):
    rows = [chat_row("Q", "A", "B"), chat_row("Q", "A", "C")]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir)
    assert data.columns == {}
    some = load(write_jsonl(tmp_path / "b.jsonl", [{**rows[0], "margin": 2.0}, rows[1]]), tokenizer_dir)
    assert some.columns["margin"].tolist() == [2.0, 0.0]
    assert some.fingerprint != data.fingerprint


def test_hashes_keep_the_sides_apart():
    a, b, c = (np.array(ids, np.int32) for ids in ([1], [2, 3], [4]))
    keys = {group_hash(a, (b, c)), group_hash(a, (c, b)), group_hash(np.array([1, 2], np.int32), (b[1:], c))}
    assert len(keys) == 3 and all(len(key) == 16 for key in keys)


def test_whole_render_keeps_what_the_template_writes_after_the_end(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    tokenizer = load_tokenizer(tokenizer_dir)
    assert tokenizer.decode(load(path, tokenizer_dir, whole_render=True)[0].completions[0]) == "Yes 0<|im_end|>\n"
    assert tokenizer.decode(load(path, tokenizer_dir)[0].completions[0]) == "Yes 0<|im_end|>"


def test_every_reason_is_counted_with_its_rows(tmp_path: Path, tokenizer_dir: Path):
    bad = [row for rows in BAD_ROWS.values() for row in rows]
    data = load(write_jsonl(tmp_path / "a.jsonl", [*ROWS, *bad]), tokenizer_dir)
    report = data.report.to_json()
    path = str(tmp_path / "a.jsonl")
    lines = {code: entry["rows"] for code, entry in report["rejected"].items()}
    assert lines == {
        "schema": [f"{path}:9", f"{path}:10"],
        "prompt_mismatch": [f"{path}:11"],
        "identical": [f"{path}:12"],
        "empty_completion": [f"{path}:13"],
        "duplicate": [f"{path}:14"],
    }
    assert report["rejected"]["duplicate"] == {
        "count": 1,
        "examples": [{"row": f"{path}:14", "detail": "the same as row 1"}],
        "rows": [f"{path}:14"],
    }
    assert (report["rows_read"], report["rows_kept"], report["rows_rejected"]) == (14, 8, 6)
    assert report["files"] == [{"path": path, "format": "implicit_prompt", "rows": 14}]
    assert json.loads(json.dumps(report)) == report
    table = data.report.table()
    assert "train: 8 of 14 rows kept" in table
    assert f"{path}: implicit_prompt, 14 rows" in table
    assert f"    {path}:9: rejected is missing" in table
    assert "rejected schema: 2 (" in table


def test_only_the_first_rejections_are_shown_and_all_are_written(tmp_path: Path, tokenizer_dir: Path):
    rows = [*(chat_row(f"Q{i}", "A", "B") for i in range(10)), *(chat_row(f"Q{i}", "A", "A") for i in range(9))]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir).report
    assert report.table().count("chosen and rejected are equal") == 5
    assert len(report.to_json()["rejected"]["identical"]["rows"]) == 9


def test_the_report_counts_what_was_done_to_kept_pairs(tmp_path: Path, tokenizer_dir: Path):
    rows = [chat_row("Q", "one two three four", "B"), chat_row("one two three four five six", "A", "B")]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, rows[0]])
    data = load(path, tokenizer_dir, max_length=20, max_completion_length=4, max_tokens=36)
    marks = {"truncated": 1, "prompt_truncated": 1, "oversize": 2, "prompt_shrunk": 0}
    assert data.report.to_json()["pairs"] == marks  # the duplicate of a truncated row is not counted
    assert "truncated: 1 pair (" in data.report.table() and "prompt_shrunk" not in data.report.table()
    tokens = data.report.to_json()["tokens"]
    assert tokens["chosen"]["max"] == 4 and tokens["total"]["sum"] == (data.lengths.sum() + data.lengths[:, 0].sum())


def test_token_statistics_are_numpys():
    lengths = np.random.default_rng(0).integers(1, 60, (203, 3), dtype=np.int32)
    counts = TokenCounts()
    assert counts.statistics() == {}
    for part in (lengths[:100], lengths[:0], lengths[100:]):
        counts.add(part)
    values = {"prompt": lengths[:, 0], "chosen": lengths[:, 1], "rejected": lengths[:, 2], "total": lengths @ [2, 1, 1]}
    assert counts.groups == 203
    assert counts.statistics() == {
        part: pytest.approx(
            {
                "min": tokens.min(),
                "mean": tokens.mean(),
                **{f"p{percent}": np.percentile(tokens, percent) for percent in (50, 90, 99)},
                "max": tokens.max(),
                "sum": tokens.sum(),
            },
            rel=1e-14,
        )
        for part, tokens in values.items()
    }


def test_columns_with_content_that_nothing_uses_are_reported(tmp_path: Path, tokenizer_dir: Path):
    extra = {"prompt": "Q", "messages": [user("Q")], "subset": "", "prompt_id": "1", "metadata": {"a": 1}, "note": None}
    rows = [chat_row("Q", "A", "B", **extra), chat_row("Q", "A", "C", messages=[])]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir).report
    assert report.unused_columns == {"messages": 1, "prompt": 1}
    assert "columns with content that nothing uses: messages (1 row), prompt (1 row)" in report.table()


def test_tools_that_the_template_has_no_place_for_are_reported(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B", tools=[{"name": "f"}])])
    assert load(path, tokenizer_dir).report.unused_columns == {"tools": 1}
    qwen3 = build_tokenizer(tmp_path / "qwen3", template=QWEN3)
    assert load(path, qwen3).report.unused_columns == {}


def test_margins_are_reported_where_the_objective_does_not_read_them(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B", margin=0.0), chat_row("R", "A", "B", margin=None)])
    dpo, rm = load(path, tokenizer_dir), load(path, tokenizer_dir, reads=("margin",))
    assert (dpo.report.unused_columns, rm.report.unused_columns) == ({"margin": 1}, {})
    assert "columns with content that nothing uses: margin (1 row)" in dpo.report.table()
    assert "margin" in dpo.columns and "margin" in rm.columns  # part of both fingerprints


def test_pair_ids_make_duplicates_where_they_were_asked_for(tmp_path: Path, tokenizer_dir: Path):
    rows = [chat_row("Q", "A", answer, prompt_id="same") for answer in ("B", "C", "D")]
    rows += [chat_row("Q", "A", "E", prompt_id=str(i)) for i in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, *({**row, "prompt_id": i} for i, row in enumerate(ROWS, 10))])
    assert load(path, tokenizer_dir).report.to_json()["rejected"]["duplicate"]["count"] == 2
    by_id = load(path, tokenizer_dir, pair_id_key="prompt_id")
    assert by_id.report.to_json()["rejected"]["duplicate"]["rows"] == [f"{path}:{n}" for n in (2, 3, 5, 6)]


def test_several_files_make_one_set_and_duplicates_across_them_are_found(tmp_path: Path, tokenizer_dir: Path):
    first = write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    second = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "Q", "chosen": "A", "rejected": "B"}, {**ROWS[1]}])
    third = write_jsonl(tmp_path / "c.jsonl", [ROWS[2], ROWS[5]])
    report = load([first, second, third], tokenizer_dir).report.to_json()
    assert [file["format"] for file in report["files"]] == ["implicit_prompt", "explicit_prompt", "implicit_prompt"]
    assert report["rejected"]["schema"]["rows"] == [f"{second}:2"]  # another format than its file's
    assert report["rejected"]["duplicate"]["examples"] == [{"row": f"{third}:1", "detail": "the same as row 3 of data file 1"}]


def test_strict_makes_the_first_bad_row_fatal(tmp_path: Path, tokenizer_dir: Path):
    rows = [*ROWS[:2], ROWS[0], chat_row("Q", "A", "A")]
    with pytest.raises(UserError, match=r"a\.jsonl:3: duplicate: the same as row 1\. Repair the row"):
        load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir, strict=True)
    assert len(load(write_jsonl(tmp_path / "b.jsonl", ROWS), tokenizer_dir, strict=True)) == 8


def test_more_than_half_bad_or_none_left_stops_with_the_report(tmp_path: Path, tokenizer_dir: Path):
    good, bad = ROWS[:2], [chat_row(f"Q{i}", "A", "A") for i in range(3)]
    with pytest.raises(UserError, match="More than half of the rows are bad: 3 of 5 rows") as stopped:
        load(write_jsonl(tmp_path / "a.jsonl", [*good, *bad]), tokenizer_dir)
    assert "rejected identical: 3" in str(stopped.value) and "a.jsonl:3: chosen and rejected are equal" in str(stopped.value)
    with pytest.raises(UserError, match="No pair is left: 1 of 1 row was rejected"):
        load(write_jsonl(tmp_path / "b.jsonl", bad[:1]), tokenizer_dir)
    assert len(load(write_jsonl(tmp_path / "c.jsonl", [*good, *bad[:2]]), tokenizer_dir)) == 2
    assert len(entries(tmp_path / "cache")) == 1  # a set that was refused leaves nothing behind


def test_the_biggest_reason_is_named_with_what_to_do(tmp_path: Path, tokenizer_dir: Path):
    bad = [{"chosen": 1}, *(chat_row(f"Q{i}", "A", "A") for i in range(2)), chat_row("Q", "A", "")]
    with pytest.raises(UserError) as stopped:
        load(write_jsonl(tmp_path / "a.jsonl", [*ROWS[:1], *bad]), tokenizer_dir)
    assert str(stopped.value).splitlines()[:3] == [
        "More than half of the rows are bad: 4 of 5 rows were rejected.",
        "Most often: identical (2). Check that --chosen-key and --rejected-key name two different answers.",
        "train: 1 of 5 rows kept",
    ]
    assert ADVICE.keys() == REASONS.keys() - {"duplicate"}


def test_rows_dropped_as_asked_are_not_bad(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], chat_row("Q", "A", "A")])
    assert len(load([path] * 3, tokenizer_dir)) == 2
    rows = [*ROWS[:2], *(chat_row("one two three four five six " * i, "A", "B") for i in range(10, 14))]
    skipping = {"max_tokens": 100, "oversize_strategy": "skip"}
    report = load(write_jsonl(tmp_path / "b.jsonl", rows), tokenizer_dir, **skipping).report
    assert (report.rows_kept, report.rows_rejected, report.rows_bad) == (2, 4, 0)
    with pytest.raises(UserError, match=r"No pair is left: 4 of 4 .*\nMost often: oversize \(4\)\. Raise --max-tokens-per-gpu"):
        load(write_jsonl(tmp_path / "c.jsonl", rows[2:]), tokenizer_dir, **skipping)


def test_a_budget_smaller_than_any_pair_with_skip_is_an_error(tmp_path: Path, tokenizer_dir: Path):
    with pytest.raises(UserError, match="No pair is left.*\n(.*\n)*.*exceed --max-tokens-per-gpu 10"):
        load(
            write_jsonl(tmp_path / "a.jsonl", ROWS),
            tokenizer_dir,
            max_length=20,
            max_completion_length=9,
            max_tokens=10,
            oversize_strategy="skip",
        )


def test_a_broken_last_line_is_found_before_the_tokenizer_is_read(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with path.open("a") as stream:
        stream.write('{"chosen": \n')
    (tmp_path / "no_tokenizer").mkdir()
    with pytest.raises(UserError, match=r"a\.jsonl:9: not valid JSON"):
        load(path, tmp_path / "no_tokenizer")


def test_missing_data_or_tokenizer_is_an_error(tmp_path: Path, tokenizer_dir: Path):
    with pytest.raises(UserError, match="gone.jsonl: no such file"):
        load(tmp_path / "gone.jsonl", tokenizer_dir)
    with pytest.raises(UserError, match="gone: no such directory"):
        load(write_jsonl(tmp_path / "a.jsonl", ROWS), tmp_path / "gone")


def test_the_cache_is_found_without_tokenizing(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, ROWS[0]])
    first = load(path, tokenizer_dir)
    moved = path.rename(tmp_path / "moved.jsonl")
    monkeypatch.setattr(load_module, "load_tokenizer", None)
    again = load(moved, tokenizer_dir)
    assert again.fingerprint == first.fingerprint
    assert again.report.to_json() == json.loads(json.dumps(first.report.to_json()).replace("a.jsonl", "moved.jsonl"))


def test_the_cache_key_follows_what_decides_the_ids(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    copy = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, copy)

    def key(**options: Any) -> str:
        return cache_key([path], tokenizer_dir=copy, options=DataOptions(**options))

    keys = {key(), key(max_length=600), key(whole_render=True), key(chat_template_kwargs={"enable_thinking": False})}
    assert len(keys) == 4
    os.utime(path, (0, 0))
    assert key() in keys
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    keys.add(key())
    write_jsonl(path, ROWS[1:])
    keys.add(key())
    assert len(keys) == 6


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [chat_row(f"Question {i % 500}?", f"Yes {i % 500}", "No", margin=float(i)) for i in range(600)]
    rows[300] = {"chosen": "bad"}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(pipeline, "MIN_ROWS_FOR_POOL", 1)
    for workers in (1, 2):
        load(path, tokenizer_dir, cache=tmp_path / f"cache{workers}", workers=workers)
    assert contents(tmp_path / "cache1") == contents(tmp_path / "cache2")


def test_a_workers_error_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = build_tokenizer(tmp_path / "plain", template=None)
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(pipeline, "MIN_ROWS_FOR_POOL", 1)
    with pytest.raises(UserError, match="The tokenizer has no chat template"):
        load(path, plain, workers=2)
    assert entries(tmp_path / "cache") == []


def test_a_worker_that_dies_is_an_error(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def dies(*args: Any, **kwargs: Any) -> Iterator[None]:
        raise BrokenProcessPool
        yield

    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(pipeline, "MIN_ROWS_FOR_POOL", 1)
    monkeypatch.setattr(worker, "_in_order", dies)
    with pytest.raises(UserError, match="A tokenizing process died, .* smaller --num-workers"):
        load(path, tokenizer_dir, workers=2)


def flip(file: Path, *, byte: int = -1) -> None:
    """One bit of a file, as a disk may lose it."""
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a token": (lambda entry: flip(entry / "tokens.bin", byte=8), "tokens.bin is not as it was written"),
    "tokens cut": (lambda entry: os.truncate(entry / "tokens.bin", 8), "tokens.bin is not as it was written"),
    "a bit of a length": (lambda entry: flip(entry / "lengths.npy"), "lengths.npy is not as it was written"),
    "a bit of a hash": (lambda entry: flip(entry / "hashes.npy"), "hashes.npy is not as it was written"),
    "a bit of a margin": (lambda entry: flip(entry / "column_margin.npy"), "column_margin.npy is not as it was written"),
    "a refused row": (lambda entry: flip(entry / "rejected_identical.bin"), "rejected_identical.bin is not as it was"),
    "hashes gone": (lambda entry: (entry / "hashes.npy").unlink(), "hashes.npy is missing"),
    "a stranger": (lambda entry: (entry / "a").write_text(""), "a is not one of its files"),
    "meta is a list": (lambda entry: (entry / "meta.json").write_text("[]"), "meta.json is not as it was written"),
    "meta without its keys": (lambda entry: (entry / "meta.json").write_text('{"margins": false}'), "meta.json is not as"),
    "meta cut": (lambda entry: os.truncate(entry / "meta.json", 9), "meta.json is not as it was written"),
    "meta binary": (lambda entry: (entry / "meta.json").write_bytes(b"\xff\0"), "meta.json is not as it was written"),
    "no checksums": (lambda entry: (entry / CHECKSUMS).unlink(), "checksums.xxh128 cannot be read"),
    "checksums binary": (lambda entry: (entry / CHECKSUMS).write_bytes(b"\xff"), "checksums.xxh128 cannot be read"),
    "checksums empty": (lambda entry: (entry / CHECKSUMS).write_bytes(b""), "column_margin.npy is not one of its files"),
    "an empty directory": (lambda entry: [file.unlink() for file in entry.iterdir()], "checksums.xxh128 cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_named_and_written_again(tmp_path: Path, tokenizer_dir: Path, damage: str):
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, chat_row("Q", "A", "A")])
    fingerprint = load(path, tokenizer_dir).fingerprint
    (entry,), before = entries(tmp_path / "cache"), contents(tmp_path / "cache")
    change, message = DAMAGE[damage]
    change(entry)
    again = load(path, tokenizer_dir)
    assert again.fingerprint == fingerprint and contents(tmp_path / "cache") == before
    (note,) = again.report.notes
    assert note.startswith(f"{entry}: {message}") and note.endswith("; the rows were tokenized again")
    assert f"  {note}" in again.report.table().splitlines()
    assert load(path, tokenizer_dir).report.notes == ()


def test_a_rank_trusts_what_another_has_checked(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"tokenizer_dir": tokenizer_dir, "options": DataOptions(), "cache_dir": tmp_path / "cache"}
    paths = [str(write_jsonl(tmp_path / "a.jsonl", ROWS))]
    first = load_pairs(paths, **options, num_workers=1, title="train", verify=False)
    monkeypatch.setattr(dataset, "damage", None)
    assert load_pairs(paths, **options, num_workers=1, title="train", verify=False).fingerprint == first.fingerprint
    with pytest.raises(TypeError):
        load_pairs(paths, **options, num_workers=1, title="train")


@pytest.mark.parametrize("place", ["entry", "file", "nowhere"])
def test_a_link_in_the_cache_is_refused_and_what_it_names_left_alone(tmp_path: Path, tokenizer_dir: Path, place: str):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    load(path, tokenizer_dir)
    (entry,) = entries(tmp_path / "cache")
    link, target = (entry / "tokens.bin", tmp_path / "tokens.bin") if place == "file" else (entry, tmp_path / "elsewhere")
    link.rename(target)
    link.symlink_to(tmp_path / "nothing" if place == "nowhere" else target)
    before = sorted(target.iterdir()) if target.is_dir() else target.read_bytes()
    with pytest.raises(UserError) as caught:
        load(path, tokenizer_dir)
    told = "is a symbolic link, and a cache holds files: remove it, or choose another --data-cache-dir"
    assert str(caught.value) == f"{link} {told}"
    assert before == (sorted(target.iterdir()) if target.is_dir() else target.read_bytes())
    link.unlink()
    assert len(load(path, tokenizer_dir)) == 8


def test_a_fifo_in_the_cache_blocks_nobody(tmp_path: Path, tokenizer_dir: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    load(path, tokenizer_dir)
    (entry,) = entries(tmp_path / "cache")
    (entry / "meta.json").unlink()
    os.mkfifo(entry / "meta.json")
    with pytest.raises(UserError, match="meta.json is not a regular file, and a cache holds files"):
        load(path, tokenizer_dir)


def test_refused_rows_take_no_memory(tmp_path: Path):
    """From the pipeline into the entry, out of it, and into data_report.json: fifty thousand of them, a row at a time."""
    tracemalloc.start()
    try:
        rejections = Rejections()
        for number in range(1, 50_001):
            rejections.add((0, number), "no answer")
        nothing = {"marks": {}, "unused_columns": {}, "dropped_fields": {}, "tokens": {}}
        files = (FileSummary("a.jsonl", "implicit_prompt", 50_000),)
        report = DataReport(title="train", files=files, rows_kept=0, rejected={"schema": rejections}, **nothing)
        meta = json.loads(json.dumps(report.to_meta(tmp_path)))
        again = DataReport.from_meta(meta, title="train", paths=["b.jsonl"], directory=tmp_path)
        with whole_file(tmp_path / "data_report.json") as stream:
            json.dump(again.to_json(rows=OneByOne), stream, indent=1)
        assert len(json.dumps(meta)) < 1000 and len(again.table()) < 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000
    written = json.loads((tmp_path / "data_report.json").read_text())["rejected"]["schema"]
    assert written["count"] == again.rows_rejected == 50_000
    assert written["rows"] == [f"b.jsonl:{number}" for number in range(1, 50_001)]
    assert again.rejected["schema"].details == ["no answer"] * 5


def test_what_a_killed_process_left_in_the_cache_is_removed(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    monkeypatch.setattr(scratch, "_HOST", "here")
    left, elsewhere = (tmp_path / "cache" / f".{'0' * 64}.{host}.{'1' * 32}.partial" for host in ("here", "another"))
    for directory in (left, elsewhere):  # another machine's may be in use: its lock is not seen from here everywhere
        directory.mkdir(parents=True)
    load(path, tokenizer_dir)
    assert not left.exists()
    assert elsewhere.exists()
    assert sum(entry.name[0] != "." for entry in entries(tmp_path / "cache")) == 1


def test_the_first_of_two_writers_wins(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    publish = dataset.EntryWriter.publish

    def publish_late(writer: dataset.EntryWriter, report: DataReport) -> None:
        monkeypatch.setattr(dataset.EntryWriter, "publish", publish)
        load(path, tokenizer_dir)  # another process, meanwhile
        publish(writer, report)

    monkeypatch.setattr(dataset.EntryWriter, "publish", publish_late)
    assert len(load(path, tokenizer_dir)) == 8
    assert len(entries(tmp_path / "cache")) == 1


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: the tokenized data cannot be written: .*--data-cache-dir"):
        load(path, tokenizer_dir, cache=tmp_path / "file")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dataset.EntryWriter, "add", full)
    with pytest.raises(UserError, match="cache: the tokenized data cannot be written: No space left on device"):
        load(path, tokenizer_dir)
    assert entries(tmp_path / "cache") == []
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(UserError, match="No space left on device"):
        load(path, tokenizer_dir)


def test_a_directory_of_files_loads_by_its_path_as_text(tmp_path: Path, tokenizer_dir: Path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "b.jsonl", ROWS[:4])
    write_jsonl(tmp_path / "data" / "a.jsonl", ROWS[4:])
    data = load_pairs(
        [str(tmp_path / "data")],
        tokenizer_dir=str(tokenizer_dir),
        options=DataOptions(),
        cache_dir=str(tmp_path / "cache"),
        num_workers=0,
        title="eval",
    )
    assert isinstance(data, GroupDataset)
    assert data.columns["margin"].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert data.report.table().startswith("eval: 8 of 8 rows kept")
