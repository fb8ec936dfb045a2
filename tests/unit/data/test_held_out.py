"""Pairs in training and evaluation sets alike are counted and told, and fatal where asked."""

from pathlib import Path

import pytest

from relax.data.held_out import check_held_out, shared_pairs
from relax.errors import UserError
from tests.unit.data.samples import build_tokenizer, chat_row, load, write_jsonl

ROWS = [chat_row(f"Question {i}", f"Yes {i}", f"No {i}") for i in range(20)]


def test_pairs_in_both_sets_are_counted_and_told(tmp_path: Path):
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    train = load(write_jsonl(tmp_path / "train.jsonl", ROWS[:15]), tokenizer)
    rows = [ROWS[17], {**ROWS[3], "prompt_id": "other"}, ROWS[18], ROWS[14], chat_row("Question 4", "No 4", "Yes 4")]
    held = load(write_jsonl(tmp_path / "eval.jsonl", rows), tokenizer)
    assert shared_pairs(held, train).tolist() == [1, 3]
    with pytest.raises(
        UserError, match=r"^train: 2 of 5 evaluation pairs are in the training set, too \(first: pair 2\)\. Take"
    ):
        check_held_out(held, train, strict=True)
    check_held_out(held, train, strict=False)
    assert "  2 of 5 evaluation pairs are in the training set, too (first: pair 2)\n" in held.report.table()
    assert held.report.to_json()["notes"] == ["2 of 5 evaluation pairs are in the training set, too (first: pair 2)"]


def test_sets_that_share_nothing_are_not_told_of(tmp_path: Path):
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    train = load(write_jsonl(tmp_path / "train.jsonl", ROWS[:15]), tokenizer)
    held = load(write_jsonl(tmp_path / "eval.jsonl", ROWS[15:]), tokenizer)
    check_held_out(held, train, strict=True)
    assert held.report.notes == ()
