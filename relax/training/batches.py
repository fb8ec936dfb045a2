"""From a data set to the batches of a run: which groups a step takes, how they are packed, their reference rows."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from relax.backend.engine import Batch, Engine
from relax.data import GroupDataset, PairOrder
from relax.errors import UserError
from relax.metrics import Work, group_means
from relax.objectives import with_role
from relax.packing import StepPlan, laid_out_tokens, plan_step
from relax.reference.table import ReferenceTable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Packing:
    """How any list of groups becomes micro-batches on this run's ranks."""

    dp_size: int
    max_tokens: int
    share_prompt: bool
    microbatch_multiple: int
    area_cost: float
    row_multiple: int

    def plan(self, lengths: np.ndarray) -> StepPlan:
        """The plan of one step over lengths [num_groups, 1 + K]."""
        return plan_step(
            lengths,
            dp_size=self.dp_size,
            max_tokens=self.max_tokens,
            share_prompt=self.share_prompt,
            microbatch_multiple=self.microbatch_multiple,
            area_cost=self.area_cost,
        )


@dataclass(frozen=True, slots=True)
class _Selection:
    """The groups of one step, read when asked for, so that a rank reads only its own."""

    dataset: GroupDataset
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Any:
        return self.dataset[int(self.indices[position])]


@dataclass(slots=True)
class Batches:
    """A data set in steps. Training shuffles by seed and epoch; evaluation goes through in order once."""

    dataset: GroupDataset
    packing: Packing
    batch_size: int
    seed: int
    shuffle: bool
    table: ReferenceTable | None = None
    order: PairOrder = field(init=False)

    def __post_init__(self) -> None:
        self.order = PairOrder(len(self.dataset), batch_size=self.batch_size, seed=self.seed, shuffle=self.shuffle)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def all_steps(self) -> range:
        """The steps of the first epoch, from 1."""
        return range(1, self.steps_per_epoch + 1)

    def indices(self, step: int) -> tuple[int, np.ndarray]:
        """(epoch, group indices) of a step, counted from 1."""
        return self.order.at_step(step)

    def consumed(self, step: int) -> int:
        """Groups trained on after a step, over all epochs."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * len(self.dataset) + steps * self.batch_size

    def batch(self, indices: np.ndarray, *, with_reference: bool = True) -> Batch:
        """The groups at `indices`, packed; reference rows of groups that lack them are an error."""
        lengths = self.dataset.lengths[indices]
        return Batch(
            groups=_Selection(self.dataset, indices),
            plan=self.packing.plan(lengths),
            lengths=lengths,
            references=self.table.take(indices) if self.table is not None and with_reference else None,
            ranks=None if self.dataset.ranks is None else self.dataset.ranks[indices],
            columns={name: column[indices] for name, column in self.dataset.columns.items()},
        )

    def epoch(self) -> Iterator[np.ndarray]:
        """The group indices of each step of the first epoch."""
        for step in self.all_steps:
            yield self.indices(step)[1]

    def work(self, indices: np.ndarray, plan: StepPlan, *, scores_tokens: bool) -> Work:
        """What the step computes, from its plan."""
        lengths, shared, padding = self.dataset.lengths[indices], np.zeros(len(indices), dtype=bool), 0
        for micro in (micro for rank in plan.ranks for micro in rank):
            groups = list(micro.groups)
            shared[groups] = micro.shared
            tokens = int(laid_out_tokens(lengths[groups], shared[groups]).sum()) if groups else 0
            padding += -tokens % self.packing.row_multiple if tokens else self.packing.row_multiple
        return Work.of(lengths, shared, scores_tokens=scores_tokens, padding=padding)


class ReadAhead(Generic[T]):
    """Reads what a step needs while the step before it computes: one thread, one step ahead.

    What `read(step)` raises, `take(step)` raises, no sooner. Steps that nobody takes change nothing.
    """

    def __init__(self, read: Callable[[int], T], *, steps: range) -> None:
        """Begin to read the first of `steps`."""
        self._read, self._steps = read, steps
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read ahead")
        self._next: dict[int, Future[T]] = {}
        self._begin(steps.start)

    def _begin(self, step: int) -> None:
        self._next = {step: self._thread.submit(self._read, step)} if step in self._steps else {}

    def take(self, step: int) -> T:
        """What `read(step)` gave; begins to read the step after it."""
        if step not in self._next:
            self._begin(step)
        found = self._next[step].result()
        self._begin(step + 1)
        return found

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def evaluate(engine: Engine, batches: Batches, *, prefix: str) -> dict[str, float]:
    """Metrics over every group of the set, as {prefix + name: mean over groups}, and their number."""
    values = [engine.evaluate(batches.batch(indices)) for indices in batches.epoch()]
    metrics = engine.objective.metrics
    means = group_means(np.concatenate(values), [metric.name for metric in metrics], prefix=prefix)
    if not np.isfinite(list(means.values())).all():
        raise UserError(
            f"the evaluation {prefix.rstrip('_')} is not a finite number: the weights are damaged, or training diverged; "
            "checkpoints saved before are as they were"
        )
    for metric in with_role(metrics, "reference"):  # the same at every evaluation
        del means[prefix + metric.name]
    return {**means, prefix + "num_pairs": len(batches.dataset)}
