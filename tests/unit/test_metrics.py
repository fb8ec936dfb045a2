"""Means over pairs, and a step's work counted by hand."""

import numpy as np
import pytest

from relax.metrics import ModelShape, Work, group_means, throughput

LENGTHS = np.array([[3, 2, 1], [1, 4, 5]])
SHAPE = ModelShape(num_layers=2, layer_parameters=100, attention_width=8, hidden_size=10, head_width=50)


def test_a_metric_is_one_mean_over_all_pairs() -> None:
    values = np.array([[1.0, 0.0], [2.0, 1.0], [6.0, 1.0]])
    means = group_means(values, ("loss", "strict_accuracy"), prefix="train/dpo/")
    assert means == {"train/dpo/loss": 3.0, "train/dpo/strict_accuracy": 2 / 3}
    assert all(type(value) is float for value in means.values())


def test_values_and_names_must_match() -> None:
    with pytest.raises(ValueError):
        group_means(np.zeros((3, 2)), ("loss",), prefix="")


@pytest.mark.parametrize(
    ("shared", "tokens", "area"),
    [
        # The first pair: 3 + 2 + 1 tokens; prompt 1+2+3 entries, chosen 4+5, rejected 4.
        # The second: 1 + 4 + 5 tokens; prompt 1, chosen 2+3+4+5, rejected 2+3+4+5+6.
        ([True, True], 6 + 10, (6 + 9 + 4) + (1 + 14 + 20)),
        ([False, True], 9 + 10, (12 + 9 + 4) + (1 + 14 + 20)),
        ([False, False], 9 + 11, (12 + 9 + 4) + (2 + 14 + 20)),
    ],
)
def test_tokens_and_attention_entries_are_exact(shared: list[bool], tokens: int, area: int) -> None:
    work = Work.of(LENGTHS, np.array(shared), scores_tokens=True)
    assert work == Work(tokens=tokens, attention_area=area, scored_rows=12, rows=tokens)


def test_a_scalar_head_scores_one_row_per_answer() -> None:
    assert Work.of(LENGTHS, np.array([True, True]), scores_tokens=False).scored_rows == 4


def test_padding_is_rows_and_never_tokens() -> None:
    work = Work.of(LENGTHS, np.array([True, True]), scores_tokens=True, padding=4)
    assert (work.tokens, work.rows) == (16, 20)


def test_attention_entries_of_long_pairs_do_not_overflow() -> None:
    work = Work.of(np.array([[100_000, 100_000, 1]], dtype=np.int32), np.array([True]), scores_tokens=True)
    assert work.attention_area == 200_000 * 200_001 // 2 + 100_001


def test_flops_are_six_per_parameter_and_token() -> None:
    work = Work(tokens=7, attention_area=11, scored_rows=5, rows=7)
    layers = 2 * (6 * 100 * 7 + 12 * 8 * 11)
    assert work.training_flops(SHAPE) == layers + 6 * 10 * 50 * 5


def test_no_pairs_are_no_work() -> None:
    nothing = Work.of(np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=bool), scores_tokens=True)
    assert nothing == Work(tokens=0, attention_area=0, scored_rows=0, rows=0)
    assert nothing.training_flops(SHAPE) == 0


def test_throughput_is_per_device_except_pairs() -> None:
    work = Work(tokens=800, attention_area=0, scored_rows=0, rows=1000)
    found = throughput(work, SHAPE, seconds=2.0, num_pairs=10, world_size=4, peak_tflops=1e-6)
    tflops = 2 * 6 * 100 * 800 / 2.0 / 4 / 1e12
    assert found == pytest.approx(
        {
            "perf/step_time_s": 2.0,
            "perf/pairs_per_s": 5.0,
            "perf/tokens_per_s_per_gpu": 100.0,
            "perf/tflops_per_gpu": tflops,
            "perf/mfu": tflops / 1e-6,
            "perf/packing_efficiency": 0.8,
        },
        rel=1e-12,
    )
