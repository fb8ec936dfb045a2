"""Which pairs each step trains on: a pure function of seed and step, so that resume needs the step number alone.

Invariants: an epoch visits every pair once; its order depends on (seed, epoch) alone; an epoch has
ceil(num_pairs / batch_size) steps, the last one short. Steps count from 1, epochs from 0.
The order sorts raw 64-bit draws of PCG64: NumPy promises that stream to stay the same, its `permutation` not.
"""

import numpy as np


def epoch_order(num_pairs: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Pair indices in the order of one epoch, int64 [num_pairs]."""
    if not shuffle:
        return np.arange(num_pairs, dtype=np.int64)
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_pairs)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


def batch_at_step(step: int, *, num_pairs: int, batch_size: int, seed: int, shuffle: bool) -> tuple[int, np.ndarray]:
    """(epoch, pair indices int64 [<= batch_size]) of a step; the first step is 1."""
    if step < 1 or num_pairs < 1 or batch_size < 1:
        raise ValueError(f"step {step}, num_pairs {num_pairs} and batch_size {batch_size} must all be at least 1")
    epoch, position = divmod(step - 1, -(-num_pairs // batch_size))
    order = epoch_order(num_pairs, seed=seed, epoch=epoch, shuffle=shuffle)
    return epoch, order[position * batch_size : (position + 1) * batch_size]
