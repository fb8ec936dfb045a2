"""Which pairs each step trains on: a pure function of seed and step, so that resume needs the step number alone.

Invariants: an epoch visits every pair once; its order depends on (seed, epoch) alone; an epoch has
ceil(num_pairs / batch_size) steps, the last one short. Steps count from 1, epochs from 0. An epoch is put in order once,
however many of its steps are asked for: a step costs what its own pairs cost.
The order sorts raw 64-bit draws of PCG64: NumPy promises that stream to stay the same, its `permutation` not.
"""

import numpy as np


def epoch_order(num_pairs: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Pair indices in the order of one epoch, [num_pairs], int32 where they fit."""
    kind = np.int32 if num_pairs <= np.iinfo(np.int32).max else np.int64
    if not shuffle:
        return np.arange(num_pairs, dtype=kind)
    draws = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_pairs)
    return np.argsort(draws, kind="stable").astype(kind, copy=False)


class PairOrder:
    """The pairs of every step. Keeps the order of the epoch that was asked for last."""

    def __init__(self, num_pairs: int, *, batch_size: int, seed: int, shuffle: bool) -> None:
        if num_pairs < 1 or batch_size < 1:
            raise ValueError(f"num_pairs {num_pairs} and batch_size {batch_size} must be at least 1")
        self.num_pairs, self.batch_size, self.seed, self.shuffle = num_pairs, batch_size, seed, shuffle
        self._kept: tuple[int, np.ndarray] | None = None  # replaced as one, so that threads may share it

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_pairs // self.batch_size)

    def epoch(self, number: int) -> np.ndarray:
        """`epoch_order` of one epoch."""
        kept = self._kept
        if kept is None or kept[0] != number:
            self._kept = None  # two epochs are never held at once
            kept = number, epoch_order(self.num_pairs, seed=self.seed, epoch=number, shuffle=self.shuffle)
            self._kept = kept
        return kept[1]

    def at_step(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, pair indices int64 [<= batch_size]) of a step; the first step is 1."""
        if step < 1:
            raise ValueError(f"step {step} must be at least 1")
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        indices = self.epoch(epoch)[position * self.batch_size : (position + 1) * self.batch_size]
        return epoch, indices.astype(np.int64)

    def taken_by(self, steps: range) -> np.ndarray:
        """Which pairs some consecutive steps take, bool [num_pairs]."""
        taken = np.zeros(self.num_pairs, dtype=bool)
        first, end, size = steps.start - 1, steps.stop - 1, self.steps_per_epoch
        if first >= end:
            return taken
        if (-(-first // size) + 1) * size <= end:  # a whole epoch is among them
            taken[:] = True
            return taken
        for epoch in range(first // size, -(-end // size)):
            start, stop = max(first - epoch * size, 0), min(end - epoch * size, size)
            taken[self.epoch(epoch)[start * self.batch_size : stop * self.batch_size]] = True
        return taken

    def first_steps_with(self, pairs: np.ndarray) -> np.ndarray:
        """The steps of the first epoch, from 1, that take any of the pairs bool [num_pairs] marks; ascending."""
        return np.unique(np.flatnonzero(pairs[self.epoch(0)]) // self.batch_size) + 1
