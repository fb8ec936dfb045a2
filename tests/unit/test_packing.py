"""Each invariant of the packer's docstring, on random lengths, and its balance on real ones.

hh_lengths.csv has the tokens of 1,024 pairs of hh-rlhf (harmless-base, test split) under SmolLM2's tokenizer and template.
`benchmarks/scaling.py` measures the planner's time on them.
"""

from pathlib import Path

import numpy as np
import pytest

from relax.packing import (
    MicroBatch,
    StepPlan,
    group_costs,
    laid_out_tokens,
    plan_step,
    shares_prompt,
)


def random_lengths(num_pairs: int, *, seed: int, longest: int = 600) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest, size=(num_pairs, 3))


def real_lengths(num_pairs: int, *, first: int = 0) -> np.ndarray:
    lengths = np.loadtxt(Path(__file__).with_name("hh_lengths.csv"), dtype=np.int64, delimiter=",", skiprows=1)
    assert len(lengths) == 1024
    return lengths[first : first + num_pairs]


def tokens_of(microbatch: MicroBatch, lengths: np.ndarray) -> int:
    pairs = list(microbatch.groups)
    return int(laid_out_tokens(lengths[pairs], np.array(microbatch.shared, dtype=bool)).sum())


def rank_loads(plan: StepPlan, loads: np.ndarray) -> np.ndarray:
    """A per-pair load summed over each rank, `[dp_size]`."""
    return np.array([sum(loads[pair] for microbatch in rank for pair in microbatch.groups) for rank in plan.ranks])


@pytest.mark.parametrize("num_pairs", [0, 1, 2, 3, 7, 64, 200])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("max_tokens", "multiple"), [(400, 1), (2048, 4), (8192, 3), (10**9, 2)])
def test_every_plan_keeps_the_invariants(num_pairs: int, dp_size: int, max_tokens: int, multiple: int):
    lengths = random_lengths(num_pairs, seed=num_pairs + dp_size)
    plan = plan_step(lengths, dp_size=dp_size, max_tokens=max_tokens, microbatch_multiple=multiple)
    assert len(plan.ranks) == dp_size
    counts = {len(rank) for rank in plan.ranks}
    assert len(counts) == 1 and counts.pop() % multiple == 0 and len(plan.ranks[0]) >= 1
    everything = [pair for rank in plan.ranks for microbatch in rank for pair in microbatch.groups]
    assert sorted(everything) == list(range(num_pairs))
    sharing = shares_prompt(lengths)
    for rank in plan.ranks:
        sizes = [tokens_of(microbatch, lengths) for microbatch in rank]
        assert sizes == sorted(sizes, reverse=True), "largest first, empty ones last"
        for microbatch, size in zip(rank, sizes, strict=True):
            assert size <= max_tokens or len(microbatch.groups) == 1
            assert list(microbatch.groups) == sorted(microbatch.groups)
            assert microbatch.shared == tuple(bool(sharing[pair]) for pair in microbatch.groups)


def test_oversize_pairs_run_alone():
    lengths = np.array([[10, 5, 5], [500, 300, 300], [20, 5, 5], [900, 1, 1], [10, 5, 5]])
    (rank,) = plan_step(lengths, max_tokens=600).ranks
    assert [microbatch.groups for microbatch in rank] == [(1,), (3,), (0, 2, 4)]


def test_ranks_without_pairs_get_empty_microbatches():
    plan = plan_step(random_lengths(2, seed=0), dp_size=4, max_tokens=8192, microbatch_multiple=2)
    filled = [[bool(microbatch.groups) for microbatch in rank] for rank in plan.ranks]
    assert filled == [[True, False], [True, False], [False, False], [False, False]]
    assert plan.ranks[3] == (MicroBatch(), MicroBatch())


def test_no_pairs_give_one_round_of_empty_microbatches():
    plan = plan_step(np.zeros((0, 3), dtype=np.int64), dp_size=2, max_tokens=64, microbatch_multiple=2)
    assert plan.ranks == ((MicroBatch(), MicroBatch()),) * 2


def test_pairs_spread_over_the_microbatches_that_another_rank_needs():
    """Every rank runs as many micro-batches as the neediest, so each spreads its pairs rather than idle."""
    lengths = np.array([[0, 450, 450]] + [[0, 50, 50]] * 9)
    plan = plan_step(lengths, dp_size=2, max_tokens=900, microbatch_multiple=3)
    assert [[len(microbatch.groups) for microbatch in rank] for rank in plan.ranks] == [[1, 0, 0], [3, 3, 3]]


def test_a_tight_rank_keeps_its_best_fit():
    """Sizes 6 5 4 3 2 into two of 10: spreading evenly puts 6 + 3 + 2 together, best fit finds 6 + 4 and 5 + 3 + 2."""
    lengths = np.array([[0, size, 0] for size in (6, 5, 4, 3, 2)])
    (rank,) = plan_step(lengths, max_tokens=10).ranks
    assert [microbatch.groups for microbatch in rank] == [(0, 2), (1, 3, 4)]


def test_sharing_pays_by_token_ratio():
    """(2P + C + R) / (P + C + R): 1.06 does not pay, 1.10 and more does; a missing prompt cannot be shared."""
    lengths = np.array([[32, 256, 256], [99, 450, 450], [100, 450, 450], [600, 200, 200], [0, 10, 10]])
    assert shares_prompt(lengths).tolist() == [False, False, True, True, False]


def test_sharing_never_depends_on_the_plan():
    lengths = random_lengths(64, seed=3)
    expected = {pair: bool(shared) for pair, shared in enumerate(shares_prompt(lengths))}
    for dp_size, max_tokens in ((1, 1200), (4, 4096), (7, 10**6)):
        plan = plan_step(lengths, dp_size=dp_size, max_tokens=max_tokens)
        flags = {p: s for rank in plan.ranks for m in rank for p, s in zip(m.groups, m.shared, strict=True)}
        assert flags == expected
    for pair in (0, 63):
        (alone,) = plan_step(lengths[[pair]], max_tokens=8192).ranks
        assert alone[0].shared == (expected[pair],)


def test_share_prompt_off_lays_every_prompt_out_twice():
    lengths = random_lengths(50, seed=4)
    plan = plan_step(lengths, dp_size=2, max_tokens=4096, share_prompt=False)
    assert not any(shared for rank in plan.ranks for microbatch in rank for shared in microbatch.shared)
    total = sum(tokens_of(microbatch, lengths) for rank in plan.ranks for microbatch in rank)
    assert total == (lengths.sum() + lengths[:, 0].sum())


def test_laid_out_tokens_and_costs_are_exact():
    lengths = np.array([[10, 3, 4], [10, 3, 4]])
    shared = np.array([True, False])
    assert laid_out_tokens(lengths, shared).tolist() == [17, 27]
    # Causal entries: prompt 55, chosen 6 + 30, rejected 10 + 40; the unshared pair pays the prompt's 55 twice.
    assert group_costs(lengths, shared, area_cost=0.5).tolist() == [17 + 141 / 2, 27 + 196 / 2]


@pytest.mark.parametrize("first", [0, 256, 512])
@pytest.mark.parametrize("max_tokens", [2048, 8192])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_ranks_are_balanced_on_real_lengths(first: int, max_tokens: int, share_prompt: bool):
    """64 ranks, 512 pairs: the slowest within 3% of the mean cost, and 99% of the rows that are laid out are tokens."""
    lengths = real_lengths(512, first=first)
    plan = plan_step(lengths, dp_size=64, max_tokens=max_tokens, share_prompt=share_prompt)
    shared = shares_prompt(lengths) & share_prompt
    costs = rank_loads(plan, group_costs(lengths, shared, area_cost=1 / 6144))
    assert costs.max() <= 1.03 * costs.mean()
    tokens = [tokens_of(microbatch, lengths) for rank in plan.ranks for microbatch in rank]
    rows = [max(16, -(-count // 16) * 16) for count in tokens]  # tensor 4 with sequence parallelism, context 2: multiples of 16
    assert sum(tokens) >= 0.99 * sum(rows)


@pytest.mark.parametrize("max_tokens", [1024, 2048, 4096, 8192])
@pytest.mark.parametrize(("dp_size", "num_pairs"), [(1, 32), (8, 64), (64, 512)])
def test_microbatches_stay_near_the_least_possible(max_tokens: int, dp_size: int, num_pairs: int):
    """At most ceil(largest rank / budget) + 1 while pairs are small beside the budget."""
    lengths = real_lengths(num_pairs)
    lengths[laid_out_tokens(lengths, shares_prompt(lengths)) > max_tokens / 4] //= 8
    sizes = laid_out_tokens(lengths, shares_prompt(lengths))
    plan = plan_step(lengths, dp_size=dp_size, max_tokens=max_tokens)
    assert len(plan.ranks[0]) <= -(-rank_loads(plan, sizes).max() // max_tokens) + 1


def test_the_plan_is_a_function_of_its_arguments():
    lengths = random_lengths(300, seed=9)
    first = plan_step(lengths, dp_size=4, max_tokens=3000)
    assert first == plan_step(lengths.copy(), dp_size=4, max_tokens=3000)
    assert first == plan_step(lengths.astype(np.int32), dp_size=4, max_tokens=3000)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (np.zeros((3, 1), dtype=np.int64), {}, "shape"),
        (np.zeros((3, 3)), {}, "integers"),
        (np.array([[1, 2, -1]]), {}, "negative"),
        (np.ones((1, 3), dtype=np.int64), {"dp_size": 0}, "dp_size=0"),
        (np.ones((1, 3), dtype=np.int64), {"max_tokens": 0}, "max_tokens=0"),
        (np.ones((1, 3), dtype=np.int64), {"microbatch_multiple": 0}, "microbatch_multiple=0"),
    ],
)
def test_senseless_arguments_are_refused(lengths: np.ndarray, options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, **{"max_tokens": 8192, **options})


def test_groups_of_any_size_stand_beside_each_other():
    """One completion, two, and four; a group's own completions count, and nothing where it has fewer than the largest."""
    lengths = np.array([[100, 20, 0, 0, 0], [100, 20, 30, 0, 0], [100, 20, 30, 10, 40]])
    assert shares_prompt(lengths).tolist() == [False, True, True], "one completion has nobody to share with"
    none = np.zeros(3, dtype=bool)
    assert laid_out_tokens(lengths, none).tolist() == [120, 250, 500]
    assert laid_out_tokens(lengths, ~none).tolist() == [120, 150, 200]
    assert laid_out_tokens(lengths[:2, :3], none[:2]).tolist() == [120, 250], "as in a table of pairs alone"
    (rank,) = plan_step(lengths, max_tokens=320).ranks
    assert rank == (MicroBatch((0, 1), (False, True)), MicroBatch((2,), (True,)))


def test_the_cost_of_a_group_is_that_of_its_sequences():
    """A prompt p before completions a, b, c: causal areas of (p, a), (p, b), (p, c), the prompt's own once where shared."""

    def area(rows: int) -> float:
        return rows * (rows + 1) / 2

    lengths = np.array([[50, 8, 4, 2]])
    apart = group_costs(lengths, np.array([False]), area_cost=0.5)
    once = group_costs(lengths, np.array([True]), area_cost=0.5)
    assert apart.tolist() == [164 + 0.5 * (area(58) + area(54) + area(52))]
    assert once.tolist() == [64 + 0.5 * (area(58) + area(54) + area(52) - 2 * area(50))]
