"""Rows of any number of completions, and the numbers that objectives read of them, from file to `GroupDataset`."""

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from relax.data import DataOptions
from relax.data.limits import apply_limits
from relax.data.render import GroupIds
from relax.data.requirements import check_groups
from relax.data.rows import RowRejected
from relax.data.tokenizer import load_tokenizer
from relax.data.worker import group_hash
from relax.errors import UserError
from relax.objectives import OBJECTIVES, RewardModel
from tests.unit.data.samples import CHATML, build_tokenizer, chat_row, load, user, write_jsonl

PAIR = {"prompt": "Q", "chosen": "A", "rejected": "B"}
RANKING = {"prompt": "R", "completions": ["second", "first", "third"], "ranks": [2, 1, 3]}
TIED = {"prompt": "T", "completions": ["x", "y", "z", "w"], "ratings": [1, 2.5, 2.5, -1]}
LABELLED = {"prompt": [user("L")], "completion": [{"role": "assistant", "content": "yes"}], "label": True}
ALL = [PAIR, RANKING, TIED, LABELLED, {**PAIR, "prompt": "E", "tie": "true"}]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=CHATML)


def texts(data: Any, tokenizer_dir: Path) -> list[list[str]]:
    tokenizer = load_tokenizer(tokenizer_dir)
    return [[tokenizer.decode(ids).removesuffix("<|im_end|>") for ids in group.completions] for group in data]


def test_one_file_mixes_wins_rankings_ties_and_labels(tmp_path: Path, tokenizer_dir: Path):
    data = load(write_jsonl(tmp_path / "a.jsonl", ALL), tokenizer_dir, reads=("label",))
    assert texts(data, tokenizer_dir) == [["A", "B"], ["first", "second", "third"], ["y", "z", "x", "w"], ["yes"], ["A", "B"]]
    assert data.lengths.shape == (5, 5) and data.num_completions == 4
    assert np.count_nonzero(data.lengths[:, 1:], axis=1).tolist() == [2, 3, 4, 1, 2]
    assert data.ranks is not None
    assert data.ranks.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 1, 2, 3], [1, 0, 0, 0], [1, 1, 0, 0]]
    np.testing.assert_array_equal(data.columns["label"], np.array([np.nan] * 3 + [1, np.nan], np.float32))
    for i, group in enumerate(data):
        assert data.lengths[i, 1:].tolist() == [len(ids) for ids in group.completions] + [0] * (4 - len(group.completions))
        assert data.hashes[i].tobytes() == group_hash(group.prompt, group.completions)
    assert data.report.tokens["completion"]["sum"] == data.lengths[:, 1:].sum()
    assert data.report.tokens["total"]["max"] == (data.lengths[:, 1:].sum(1) + data.lengths[:, 0] * [2, 3, 4, 1, 2]).max()


def test_a_ranking_says_its_order_by_ranks_from_0_or_1_or_by_ratings(tmp_path: Path, tokenizer_dir: Path):
    ways: list[dict[str, Any]] = [
        {"ranks": [2, 1, 3]},
        {"ranks": [1, 0, 2]},
        {"ratings": [5, 9, -1]},
        {"scores": [0.5, 0.75, 0]},
    ]
    for way in ways:
        row = {"prompt": "R", "completions": RANKING["completions"], **way}
        data = load(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer_dir)
        assert texts(data, tokenizer_dir) == [["first", "second", "third"]] and data.ranks is None


def test_a_ranking_of_two_is_a_pair(tmp_path: Path, tokenizer_dir: Path):
    two = {"prompt": "Q", "completions": ["B", "A"], "ranks": [2, 1]}
    ranked, pair = (load(write_jsonl(tmp_path / f"{i}.jsonl", [row]), tokenizer_dir) for i, row in enumerate((two, PAIR)))
    assert ranked.fingerprint == pair.fingerprint and list(ranked.report.tokens) == ["prompt", "chosen", "rejected", "total"]


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"ranks": None}, "completions need ranks or ratings"),
        ({"ratings": [1, 2, 3]}, "completions need ranks or ratings, not both"),
        ({"ranks": [1, 2]}, "ranks is a list of 2 for 3 completions"),
        ({"ranks": [1, 2, 2.5]}, "ranks holds 2.5, not a whole number from 0"),
        ({"ranks": [1, 2, -1]}, "ranks holds -1, not a whole number from 0"),
        ({"ranks": [1, 2, True]}, "ranks holds True, not a finite number"),
        ({"ranks": [1, 2, "3"]}, "ranks holds '3', not a finite number"),
        ({"completions": ["a"], "ranks": [1]}, "completions holds 1: a ranking has two or more, and one is a completion"),
        ({"completions": "abc"}, "completions is not valid JSON"),
        ({"completions": ["a", 3, "b"]}, "completion 2 holds a number where a message should be"),
        ({"completions": ["a", "b", "a"]}, "completion 2 by rank and completion 3 by rank are equal"),
        ({"completions": ["a", "", "b"]}, "completion 1 by rank is empty"),
    ],
)
def test_a_ranking_that_cannot_be_read_says_why(tmp_path: Path, tokenizer_dir: Path, row: dict[str, Any], detail: str):
    data = load(write_jsonl(tmp_path / "a.jsonl", [RANKING, {**RANKING, **row}, PAIR]), tokenizer_dir)
    ((found,),) = (rejections.details for rejections in data.report.rejected.values())
    assert found == detail


def test_what_is_said_of_equal_completions_keeps_them_apart(tmp_path: Path, tokenizer_dir: Path):
    """The same tokens with another label, or tied, are no duplicates; nor have such data the same fingerprint."""
    rows = [LABELLED, {**LABELLED, "label": 0}, LABELLED, PAIR, {**PAIR, "tie": 1}, {**PAIR, "tie": False}]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir, reads=("label",))
    assert [number for _, number in data.report.rejected["duplicate"].rows] == [3, 6]
    sets = (rows[:1], rows[1:2], rows[3:4], rows[4:5])
    found = [load(write_jsonl(tmp_path / f"{i}.jsonl", part), tokenizer_dir, reads=("label",)) for i, part in enumerate(sets)]
    assert len({data.fingerprint for data in found}) == 4
    assert len({data.scored_fingerprint for data in found}) == 2, "their reference's scores are the same"


def test_pairs_have_the_bytes_that_checkpoints_and_tables_know():
    a, b, c = (np.array(ids, np.int32) for ids in ([1, 2], [3], [4, 5]))
    assert group_hash(a, (b, c)).hex() == "a1c162e8245878b179761aaa91d3f00b"
    assert group_hash(a, (b,)) != group_hash(a, (b, c[:0]))


@pytest.mark.parametrize("margins", [(None, None), (2.0, None)])
def test_the_fingerprint_of_pairs_is_of_hashes_and_margins(tmp_path: Path, tokenizer_dir: Path, margins: tuple[Any, Any]):
    rows = [chat_row("Q", "A", str(i), margin=margin, weight=3) for i, margin in enumerate(margins)]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir)
    expected = np.array([margin or 0 for margin in margins if any(margins)], "<f4")
    assert data.fingerprint == hashlib.sha256(data.hashes.tobytes() + expected.tobytes()).hexdigest() == data.scored_fingerprint
    assert list(data.columns) == (["margin"] if any(margins) else []) and data.report.unused_columns["weight"] == 2


def test_columns_that_an_objective_reads_have_their_defaults(tmp_path: Path, tokenizer_dir: Path):
    rows = [chat_row("Q", "A", "B", weight="0.5", label_smoothing=0), chat_row("Q", "A", "C", margin=1, label="ignored")]
    data = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer_dir, reads=("weight", "label_smoothing", "label", "margin"))
    assert {name: column.tolist() for name, column in data.columns.items() if name != "label_smoothing"} == {
        "weight": [0.5, 1.0],
        "margin": [0.0, 1.0],
    }
    np.testing.assert_array_equal(data.columns["label_smoothing"], np.array([0, np.nan], np.float32))
    assert data.columns["weight"].dtype == np.float32 and data.report.unused_columns == {"label": 1}
    plain = load(write_jsonl(tmp_path / "b.jsonl", [chat_row("Q", "A", "B"), chat_row("Q", "A", "C", margin=1)]), tokenizer_dir)
    assert data.fingerprint != plain.fingerprint and data.scored_fingerprint == plain.scored_fingerprint


@pytest.mark.parametrize(
    ("column", "value", "detail"),
    [
        ("weight", -1, "weight is -1: it must be at least 0"),
        ("weight", "heavy", "weight is 'heavy', not a number"),
        ("weight", 1e39, "weight is 1e+39, not a finite number"),
        ("label_smoothing", 0.5, "label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        ("label", "good", "label is 'good', not true or false"),
        ("label", 2, "label is 2, not true or false"),
    ],
)
def test_a_number_out_of_its_range_refuses_its_row(tmp_path: Path, tokenizer_dir: Path, column: str, value: Any, detail: str):
    bad = {**LABELLED, column: value}
    path = write_jsonl(tmp_path / "a.jsonl", [PAIR, {**PAIR, "prompt": "P"}, bad])
    data = load(path, tokenizer_dir, reads=(column,))
    assert data.report.rejected["schema"].details == [detail]
    assert "schema" not in load(path, tokenizer_dir).report.rejected, "nothing reads it"


@dataclass(frozen=True)
class Takes(RewardModel):
    takes: ClassVar[Any] = ("pair", "tie", "ranking", "single")
    requires: ClassVar[tuple[str, ...]] = ("label",)


def test_an_objective_of_pairs_refuses_other_groups_naming_their_rows(tmp_path: Path, tokenizer_dir: Path):
    rows = [*ALL[:3], {"prompt": "bad"}, *({**PAIR, "prompt": str(i)} for i in range(3)), *ALL[3:]]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = load(path, tokenizer_dir, reads=("label",))
    check_groups(data, Takes(), flag="FLAG", indexed=None)
    for takes, refused in (
        (("pair", "ranking", "single"), f"a pair of equally good completions, and FLAG takes a pair of .*: {path}:9. Take"),
        (("pair", "tie", "ranking"), f"a single completion, and FLAG takes .* or a ranking .*: {path}:8. Take"),
        (("tie", "ranking", "single"), f"a pair of a better and a worse completion, and FLAG .*: {path}:1, {path}:5, {path}:6"),
        (("pair", "tie", "single"), f"a ranking of more than two completions, and FLAG takes .*: {path}:2, {path}:3. Take"),
    ):
        with pytest.raises(UserError, match=refused):
            check_groups(data, type("Other", (Takes,), {"takes": takes})(), flag="FLAG", indexed=None)


def test_a_required_column_is_missed_in_the_rows_that_lack_it(tmp_path: Path, tokenizer_dir: Path):
    rows = [chat_row("Q", "A", str(i), margin=None if i % 2 else i) for i in range(16)]
    path = write_jsonl(tmp_path / "a.jsonl", [{"chosen": 1, "rejected": 2}, *rows])
    data = load(path, tokenizer_dir)
    with pytest.raises(UserError) as refused:
        check_groups(data, OBJECTIVES["dpo"](loss="odpo"), flag="--dpo-loss odpo", indexed=None)
    shown = ", ".join(f"{path}:{row}" for row in (3, 5, 7, 9, 11))
    assert str(refused.value) == (
        f"train: rows that are without margin, which --dpo-loss odpo needs: {shown} and 3 more. "
        "Take them out, or choose another loss."
    )
    unlabelled = [LABELLED, {"prompt": "x", "completion": "y"}, PAIR]
    data = load(write_jsonl(tmp_path / "b.jsonl", unlabelled), tokenizer_dir, reads=("label",))
    with pytest.raises(UserError, match=f"without label, which FLAG needs: {tmp_path / 'b.jsonl'}:2. Take"):
        check_groups(data, Takes(), flag="FLAG", indexed=None)


@pytest.mark.parametrize("strategy", ["truncate_left", "truncate_right"])
def test_limits_fit_any_group_and_leave_each_completion_a_token(strategy: str):
    for prompt, *sizes, budget in itertools.product((1, 30), (1, 40), (2, 17), (3, 33), (6, 7, 20, 61)):
        parts = [np.arange(1000 * i, 1000 * i + size, dtype=np.int32) for i, size in enumerate((prompt, *sizes))]
        ids = GroupIds(parts[0], tuple(parts[1:]), trained=tuple(sizes), rendered=tuple(sizes))
        cut = apply_limits(ids, options=DataOptions(max_tokens=budget, oversize_strategy=strategy))  # type: ignore[arg-type]
        kept = [len(part) for part in cut.completions]
        assert min(len(cut.prompt), *kept) >= 1 and 3 * len(cut.prompt) + sum(kept) <= budget
        longest = max(kept)
        assert all(size in (whole, longest) for size, whole in zip(kept, sizes, strict=True)), "the longest give way"
    with pytest.raises(RowRejected, match="--max-tokens-per-gpu 5 holds no such row at all"):
        apply_limits(ids, options=DataOptions(max_tokens=5, oversize_strategy=strategy))  # type: ignore[arg-type]
