"""Order: every pair once an epoch, a function of seed and epoch alone, the same on every machine."""

import numpy as np
import pytest

from relax.data import batch_at_step, epoch_order


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


def test_steps_walk_through_epochs_with_a_short_last_step():
    batches = [batch_at_step(step, num_pairs=10, batch_size=4, seed=7, shuffle=True) for step in range(1, 7)]
    assert [epoch for epoch, _ in batches] == [0, 0, 0, 1, 1, 1]
    assert [len(indices) for _, indices in batches] == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 1):
        seen = np.concatenate([indices for number, indices in batches if number == epoch])
        assert seen.tolist() == epoch_order(10, seed=7, epoch=epoch, shuffle=True).tolist()


def test_a_batch_larger_than_the_set_is_the_whole_set():
    epoch, indices = batch_at_step(1, num_pairs=3, batch_size=8, seed=0, shuffle=False)
    assert (epoch, indices.tolist()) == (0, [0, 1, 2])
    assert batch_at_step(2, num_pairs=3, batch_size=8, seed=0, shuffle=False)[0] == 1


@pytest.mark.parametrize("wrong", [{"step": 0}, {"num_pairs": 0}, {"batch_size": 0}])
def test_counts_start_at_one(wrong: dict[str, int]):
    values = {"step": 1, "num_pairs": 3, "batch_size": 2, **wrong}
    with pytest.raises(ValueError, match="must all be at least 1"):
        batch_at_step(values.pop("step"), seed=0, shuffle=True, **values)
