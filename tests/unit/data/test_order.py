"""Order: every pair once an epoch, a function of seed and epoch alone, the same on every machine."""

import numpy as np
import pytest

from relax.data import PairOrder, epoch_order
from relax.data import order as order_module


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide():
    order = epoch_order(1000, seed=1, epoch=0, shuffle=True)
    assert sorted(order) == list(range(1000))
    assert np.array_equal(order, epoch_order(1000, seed=1, epoch=0, shuffle=True))
    assert not np.array_equal(order, epoch_order(1000, seed=1, epoch=1, shuffle=True))
    assert not np.array_equal(order, epoch_order(1000, seed=2, epoch=0, shuffle=True))
    assert order.tolist() != list(range(1000))


def test_the_order_is_the_same_everywhere():
    assert epoch_order(8, seed=42, epoch=0, shuffle=True).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert epoch_order(5, seed=42, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert PairOrder(8, batch_size=3, seed=42, shuffle=True).at_step(2)[1].tolist() == [6, 0, 7]


def test_steps_walk_through_epochs_with_a_short_last_step():
    order = PairOrder(10, batch_size=4, seed=7, shuffle=True)
    batches = [order.at_step(step) for step in range(1, 7)]
    assert [epoch for epoch, _ in batches] == [0, 0, 0, 1, 1, 1]
    assert [len(indices) for _, indices in batches] == [4, 4, 2, 4, 4, 2]
    assert {indices.dtype for _, indices in batches} == {np.dtype(np.int64)}
    for epoch in (0, 1):
        seen = np.concatenate([indices for number, indices in batches if number == epoch])
        assert seen.tolist() == epoch_order(10, seed=7, epoch=epoch, shuffle=True).tolist()


def test_steps_may_be_asked_for_in_any_order():
    order = PairOrder(10, batch_size=4, seed=7, shuffle=True)
    for step in (5, 1, 6, 2, 2):
        assert order.at_step(step)[1].tolist() == PairOrder(10, batch_size=4, seed=7, shuffle=True).at_step(step)[1].tolist()


def test_a_batch_larger_than_the_set_is_the_whole_set():
    order = PairOrder(3, batch_size=8, seed=0, shuffle=False)
    epoch, indices = order.at_step(1)
    assert (epoch, indices.tolist()) == (0, [0, 1, 2])
    assert order.at_step(2)[0] == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_pairs_of_steps_are_the_union_of_the_steps(shuffle: bool):
    for num_pairs, batch_size in ((10, 4), (8, 4), (3, 8)):
        order = PairOrder(num_pairs, batch_size=batch_size, seed=7, shuffle=shuffle)
        for first in range(1, 9):
            for end in range(first, 12):
                expected = np.zeros(num_pairs, dtype=bool)
                for step in range(first, end):
                    expected[order.at_step(step)[1]] = True
                assert order.taken_by(range(first, end)).tolist() == expected.tolist(), (num_pairs, first, end)


def test_first_steps_with_some_pairs():
    order = PairOrder(10, batch_size=4, seed=7, shuffle=True)
    wanted = np.zeros(10, dtype=bool)
    assert order.first_steps_with(wanted).tolist() == []
    wanted[[order.at_step(3)[1][0], *order.at_step(1)[1][:2]]] = True
    assert order.first_steps_with(wanted).tolist() == [1, 3]


def test_an_epoch_is_put_in_order_once(monkeypatch: pytest.MonkeyPatch):
    """61,000 pairs cost 42 s before step 1 when every step, and the reference pass for each, sorted the epoch again."""
    made: list[int] = []

    def counted(num_pairs: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        made.append(epoch)
        return epoch_order(num_pairs, seed=seed, epoch=epoch, shuffle=shuffle)

    monkeypatch.setattr(order_module, "epoch_order", counted)
    order = PairOrder(1000, batch_size=8, seed=1, shuffle=True)
    order.taken_by(range(1, 10_000))
    assert made == []
    for step in range(1, 251):
        order.at_step(step)
    order.first_steps_with(np.ones(1000, dtype=bool))
    assert made == [0, 1, 0]
    assert order.epoch(0).dtype == np.int32


@pytest.mark.parametrize("wrong", [{"step": 0}, {"num_pairs": 0}, {"batch_size": 0}])
def test_counts_start_at_one(wrong: dict[str, int]):
    values = {"step": 1, "num_pairs": 3, "batch_size": 2, **wrong}
    with pytest.raises(ValueError, match="must be at least 1"):
        PairOrder(values["num_pairs"], batch_size=values["batch_size"], seed=0, shuffle=True).at_step(values["step"])
