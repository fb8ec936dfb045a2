"""Length limits: exact lengths and marks, sides that always keep a token, and every oversize strategy."""

import itertools
from typing import Any

import numpy as np
import pytest

from relax.data.limits import LimitedGroup, Mark, apply_limits
from relax.data.options import DataOptions
from relax.data.render import GroupIds
from relax.data.rows import RowRejected
from relax.errors import UserError


def limited(prompt: int, chosen: int, rejected: int, *, shrunk: bool = False, **options: Any) -> LimitedGroup:
    """A pair of the given lengths, whose ids tell side and place, after its limits."""
    parts = (
        np.arange(start, start + size, dtype=np.int32) for start, size in ((0, prompt), (10_000, chosen), (20_000, rejected))
    )
    settings = {"max_length": 1000, "max_completion_length": 999, "max_tokens": 10_000, **options}
    lengths = chosen, rejected
    prompt_ids, chosen_ids, rejected_ids = parts
    pair = GroupIds(prompt_ids, (chosen_ids, rejected_ids), trained=lengths, rendered=lengths, shrunk=shrunk)
    return apply_limits(pair, options=DataOptions(**settings))


def sizes(pair: LimitedGroup) -> tuple[int, int, int]:
    prompt, chosen, rejected = map(len, (pair.prompt, *pair.completions))
    return prompt, chosen, rejected


def test_a_pair_within_all_limits_is_untouched():
    pair = limited(5, 3, 4)
    assert sizes(pair) == (5, 3, 4)
    assert pair.marks == Mark(0)
    assert limited(5, 3, 4, shrunk=True).marks == Mark.PROMPT_SHRUNK


def test_answers_are_cut_on_the_right():
    pair = limited(5, 20, 3, max_completion_length=16)
    assert sizes(pair) == (5, 16, 3)
    assert pair.completions[0].tolist() == list(range(10_000, 10_016))
    assert pair.marks == Mark.TRUNCATED


def test_the_prompt_is_cut_on_the_left_for_both_sides():
    pair = limited(10, 3, 6, max_length=12, max_completion_length=11)
    assert sizes(pair) == (6, 3, 6)
    assert pair.prompt.tolist() == [4, 5, 6, 7, 8, 9]
    assert pair.marks == Mark.PROMPT_TRUNCATED


def test_a_prompt_longer_than_every_limit_leaves_both_answers():
    pair = limited(5000, 700, 900, max_length=16, max_completion_length=15)
    assert sizes(pair) == (1, 15, 15)
    assert pair.marks == Mark.PROMPT_TRUNCATED | Mark.TRUNCATED


@pytest.mark.parametrize(
    ("strategy", "lengths", "budget", "expected"),
    [
        ("keep", (10, 6, 4), 20, (10, 6, 4)),
        ("truncate_left", (10, 6, 4), 30, (10, 6, 4)),  # fits: 2 * 10 + 6 + 4
        ("truncate_left", (10, 6, 4), 20, (5, 6, 4)),
        ("truncate_left", (10, 6, 4), 21, (5, 6, 4)),
        ("truncate_left", (10, 6, 4), 10, (1, 4, 4)),
        ("truncate_left", (10, 9, 1), 8, (1, 5, 1)),
        ("truncate_left", (10, 6, 4), 4, (1, 1, 1)),
        ("truncate_right", (10, 6, 4), 28, (10, 4, 4)),
        ("truncate_right", (10, 6, 4), 26, (10, 3, 3)),
        ("truncate_right", (10, 2, 9), 25, (10, 2, 3)),
        ("truncate_right", (10, 6, 4), 20, (9, 1, 1)),
        ("truncate_right", (10, 6, 4), 4, (1, 1, 1)),
    ],
)
def test_oversize_strategies(strategy: str, lengths: tuple[int, int, int], budget: int, expected: tuple[int, int, int]):
    pair = limited(*lengths, max_tokens=budget, oversize_strategy=strategy)
    assert sizes(pair) == expected
    assert (Mark.OVERSIZE in pair.marks) == (2 * lengths[0] + lengths[1] + lengths[2] > budget)
    if strategy != "keep":
        assert 2 * expected[0] + expected[1] + expected[2] <= budget
    assert pair.prompt.tolist() == list(range(lengths[0]))[lengths[0] - expected[0] :]


def test_truncation_fits_any_pair_and_leaves_every_side_a_token():
    grid = itertools.product((1, 2, 7, 30), (1, 2, 5, 40), (1, 3, 40), range(4, 60, 5), ("truncate_left", "truncate_right"))
    for prompt, chosen, rejected, budget, strategy in grid:
        cut = sizes(limited(prompt, chosen, rejected, max_tokens=budget, oversize_strategy=strategy))
        assert min(cut) >= 1
        assert 2 * cut[0] + cut[1] + cut[2] <= budget
        assert all(after <= before for after, before in zip(cut, (prompt, chosen, rejected), strict=True))


@pytest.mark.parametrize(
    ("strategy", "budget", "message"),
    [("skip", 29, "30 tokens exceed --max-tokens-per-gpu 29"), ("truncate_left", 3, "3 holds no pair at all")],
)
def test_a_pair_that_may_not_fit_is_refused(strategy: str, budget: int, message: str):
    with pytest.raises(RowRejected, match=message) as refused:
        limited(10, 6, 4, max_tokens=budget, oversize_strategy=strategy)
    assert refused.value.code == "oversize"


def test_answers_that_are_equal_after_truncation_are_refused():
    same = np.arange(600, dtype=np.int32)
    sides = tuple(np.append(same, end).astype(np.int32) for end in (1, 2))
    ids = GroupIds(np.arange(5, dtype=np.int32), sides, trained=(601, 601), rendered=(601, 601))
    assert sizes(apply_limits(ids, options=DataOptions(max_length=1024, max_completion_length=601))) == (5, 601, 601)
    with pytest.raises(RowRejected, match="the same 512 tokens") as refused:
        apply_limits(ids, options=DataOptions(max_length=1024, max_completion_length=512))
    assert refused.value.code == "post_truncation_identical"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "--preference-max-length is 0: it must be at least 1"),
        ({"max_completion_length": -1}, "--preference-max-completion-length is -1"),
        ({"max_tokens": 0}, "--max-tokens-per-gpu is 0"),
        ({"max_length": 512, "max_completion_length": 512}, "512 must be smaller than --preference-max-length 512"),
        ({"oversize_strategy": "drop"}, "--sft-oversize-strategy 'drop' is not one of keep, skip"),
        ({"chat_template_kwargs": {"tokenize": True}}, "--apply-chat-template-kwargs cannot set tokenize"),
    ],
)
def test_options_that_cannot_work_are_errors(options: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        DataOptions(**options)  # type: ignore[arg-type]


def test_each_reading_of_an_answer_has_its_length():
    prompt, *sides = (np.arange(start, start + size, dtype=np.int32) for start, size in ((0, 5), (100, 8), (200, 9)))
    ids = GroupIds(prompt, tuple(sides), trained=(7, 8), rendered=(8, 9))
    readings = {"policy": {}, "reward model": {"whole_render": True}, "file": {"to_file": True}}
    pairs = {name: apply_limits(ids, options=DataOptions(**options)) for name, options in readings.items()}
    assert {name: sizes(pair) for name, pair in pairs.items()} == {
        "policy": (5, 7, 8),
        "reward model": (5, 8, 9),
        "file": (5, 8, 9),
    }
    assert {pair.trained for pair in pairs.values()} == {(7, 8)}
    assert {pair.marks for pair in pairs.values()} == {Mark(0)}


def test_a_tokenized_file_drops_what_is_longer_and_cuts_nothing():
    options = {"max_length": 10, "max_completion_length": 9, "max_tokens": 20, "to_file": True}
    assert sizes(limited(1, 9, 9, **options)) == (1, 9, 9)
    with pytest.raises(RowRejected, match="a side has 11 tokens, more than 10") as refused:
        limited(5, 6, 2, **options)
    assert refused.value.code == "oversize"
