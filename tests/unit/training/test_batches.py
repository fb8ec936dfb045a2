"""From a data set to steps: selection, plans, the reference pass and evaluation, with a model of plain arithmetic."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from relax.backend.engine import StepResult
from relax.metrics import ModelShape, Work
from relax.objectives import OBJECTIVES
from relax.packing import laid_out_tokens, plan_step
from relax.reference.fill import fill_table
from relax.reference.table import ReferenceTable
from relax.training.batches import Batches, Packing, ReadAhead, evaluate
from relax.training.run import Run
from tests.models import TokenPair

PAIRS, BATCH = 10, 4


class Dataset:
    """Ten pairs; the first prompt token of each is its number."""

    def __init__(self, *, margins: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(1, 12, (PAIRS, 3))
        self.ranks, self.num_completions = None, 2
        self.columns = {"margin": np.linspace(0, 1, PAIRS, dtype=np.float32)} if margins else {}
        self.hashes = rng.integers(0, 256, (PAIRS, 16), dtype=np.uint8)
        self.read: list[int] = []

    def __len__(self) -> int:
        return PAIRS

    def __getitem__(self, index: int) -> TokenPair:
        assert type(index) is int
        self.read.append(index)
        prompt, chosen, rejected = self.lengths[index]
        return TokenPair(np.full(prompt, index), np.zeros(chosen), np.zeros(rejected))


@dataclass
class Arithmetic:
    """An engine whose scores are a function of the pair's number; remembers every batch."""

    objective: Any = field(default_factory=lambda: OBJECTIVES["dpo"]())
    scored: list[list[int]] = field(default_factory=list)
    plans: list[Any] = field(default_factory=list)

    def score(self, batch: Any) -> np.ndarray:
        assert batch.references is None
        numbers = [int(batch.groups[i].prompt[0]) for i in range(len(batch.groups))]
        self.scored.append(numbers)
        self.plans.append(batch.plan)
        return np.array([[-n, -n - 0.5] for n in numbers])

    def evaluate(self, batch: Any) -> np.ndarray:
        numbers = np.array([float(batch.groups[i].prompt[0]) for i in range(len(batch.groups))])
        return numbers[:, None] + np.arange(len(self.objective.metrics))


def batches(
    *, shuffle: bool = False, margins: bool = False, table: bool = True, dp_size: int = 1, row_multiple: int = 1
) -> Batches:
    dataset: Any = Dataset(margins=margins)
    packing = Packing(
        dp_size=dp_size, max_tokens=40, share_prompt=True, microbatch_multiple=1, area_cost=0.001, row_multiple=row_multiple
    )
    made = Batches(dataset=dataset, packing=packing, batch_size=BATCH, seed=5, shuffle=shuffle)
    made.table = ReferenceTable(dataset.hashes, width=2, path=None) if table else None
    return made


def nothing() -> None: ...


def test_steps_go_through_every_pair_once_per_epoch() -> None:
    made = batches(shuffle=True)
    assert made.steps_per_epoch == 3
    steps = [made.indices(step) for step in range(1, 7)]
    assert [epoch for epoch, _ in steps] == [0, 0, 0, 1, 1, 1]
    assert [len(indices) for _, indices in steps] == [4, 4, 2, 4, 4, 2]
    first, second = (np.concatenate([i for e, i in steps if e == epoch]).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(PAIRS)) and first != second
    assert [i.tolist() for i in made.epoch()] == [i.tolist() for _, i in steps[:3]]


def test_consumed_pairs_count_short_last_steps() -> None:
    assert [batches().consumed(step) for step in range(8)] == [0, 4, 8, 10, 14, 18, 20, 24]


def test_a_batch_reads_only_the_pairs_that_are_asked_for() -> None:
    made = batches(margins=True)
    assert made.table is not None
    made.table.put(np.arange(PAIRS), np.arange(2 * PAIRS).reshape(PAIRS, 2))
    dataset: Any = made.dataset
    batch = made.batch(np.array([7, 2, 5]))
    assert dataset.read == [] and len(batch.groups) == 3
    assert batch.groups[1].prompt[0] == 2 and dataset.read == [2]
    assert batch.references.tolist() == [[14, 15], [4, 5], [10, 11]]
    assert batch.columns["margin"].tolist() == dataset.columns["margin"][[7, 2, 5]].tolist()
    expected = plan_step(dataset.lengths[[7, 2, 5]], dp_size=1, max_tokens=40, area_cost=0.001)
    assert batch.plan == expected


def test_without_margins_or_table_a_batch_has_none() -> None:
    batch = batches(table=False).batch(np.array([1]))
    assert not batch.columns and batch.references is None


def test_a_batch_without_its_reference_is_an_error() -> None:
    with pytest.raises(KeyError, match="group 1"):
        batches().batch(np.array([1]))


@pytest.mark.parametrize("dp_size", [1, 3])
def test_work_is_the_plans(dp_size: int) -> None:
    made = batches(dp_size=dp_size)
    indices = np.array([3, 1, 8, 0])
    plan = made.packing.plan(made.dataset.lengths[indices])
    shared = np.zeros(4, dtype=bool)
    for rank in plan.ranks:
        for micro in rank:
            shared[list(micro.groups)] = micro.shared
    assert shared.sum() > 0
    expected = Work.of(made.dataset.lengths[indices], shared, scores_tokens=True)
    assert made.work(indices, plan, scores_tokens=True) == expected


def test_padding_counts_as_laid_out_rows() -> None:
    made = batches(dp_size=2, row_multiple=8)
    indices = np.arange(3)
    plan = made.packing.plan(made.dataset.lengths[indices])
    rows = 0
    for micro in (micro for rank in plan.ranks for micro in rank):
        tokens = laid_out_tokens(made.dataset.lengths[list(micro.groups)], np.array(micro.shared)).sum() if micro.groups else 0
        rows += max(8, -(-int(tokens) // 8) * 8)
    work = made.work(indices, plan, scores_tokens=True)
    assert work.rows == rows > work.tokens


# The reference pass


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_reference_pass_has_the_first_epochs_batches(shuffle: bool) -> None:
    """Same pairs, same order, same plan as training's first epoch: equal bits at its steps."""
    made, engine, ticks = batches(shuffle=shuffle), Arithmetic(), []
    assert fill_table(engine, made, steps=range(1, 7), after_each=lambda: ticks.append(1)) == PAIRS
    first = [made.indices(step)[1] for step in (1, 2, 3)]
    assert engine.scored == [indices.tolist() for indices in first]
    assert engine.plans == [made.batch(indices).plan for indices in first]
    assert len(ticks) == 3
    assert made.table is not None
    assert made.table.take(np.arange(PAIRS)).tolist() == [[-n, -n - 0.5] for n in range(PAIRS)]


def test_a_second_pass_scores_nothing() -> None:
    made, engine = batches(), Arithmetic()
    fill_table(engine, made, steps=range(1, 4), after_each=nothing)
    assert fill_table(engine, made, steps=range(1, 100), after_each=nothing) == 0
    assert len(engine.scored) == 3


def test_only_the_pairs_of_this_runs_steps_are_scored() -> None:
    made, engine = batches(shuffle=True), Arithmetic()
    assert fill_table(engine, made, steps=range(2, 3), after_each=nothing) == BATCH
    assert engine.scored == [made.indices(2)[1].tolist()]
    assert fill_table(engine, made, steps=range(5, 5), after_each=nothing) == 0


def test_pairs_of_a_later_epoch_are_scored_in_the_first_epochs_steps() -> None:
    """A run resumed in its second epoch still gets the numbers that an uninterrupted one has."""
    whole, resumed, engine = batches(shuffle=True), batches(shuffle=True), Arithmetic()
    fill_table(Arithmetic(), whole, steps=range(1, 7), after_each=nothing)
    fill_table(engine, resumed, steps=range(6, 7), after_each=nothing)
    first = [resumed.indices(step)[1].tolist() for step in (1, 2, 3)]
    assert all(scored in first for scored in engine.scored)
    needed = resumed.indices(6)[1]
    assert whole.table is not None and resumed.table is not None
    assert (resumed.table.take(needed) == whole.table.take(needed)).all()


def test_an_interrupted_pass_repeats_only_the_step_it_lost() -> None:
    made, engine = batches(shuffle=True), Arithmetic()

    class Stop(Exception): ...

    def stop() -> None:
        if len(engine.scored) == 2:
            raise Stop

    with pytest.raises(Stop):
        fill_table(engine, made, steps=range(1, 4), after_each=stop)
    assert fill_table(engine, made, steps=range(1, 4), after_each=nothing) == 2
    assert engine.scored == [made.indices(step)[1].tolist() for step in (1, 2, 3)]


def test_a_lost_row_has_its_whole_step_computed_again() -> None:
    made, engine = batches(shuffle=True), Arithmetic()
    fill_table(engine, made, steps=range(1, 4), after_each=nothing)
    assert made.table is not None
    lost = made.indices(2)[1]
    made.table.values[lost[1]] = np.nan
    assert fill_table(engine, made, steps=range(1, 4), after_each=nothing) == BATCH
    assert engine.scored[3:] == [lost.tolist()]


# Reading ahead


def readers() -> int:
    return sum(thread.name.startswith("read ahead") for thread in threading.enumerate())


def test_the_next_step_is_read_while_this_one_computes() -> None:
    began = {step: threading.Event() for step in range(1, 5)}

    def read(step: int) -> int:
        began[step].set()
        return 10 * step

    ahead = ReadAhead(read, steps=range(1, 4))
    assert began[1].wait(5), "before anyone asks for it"
    for step in (1, 2, 3):
        assert ahead.take(step) == 10 * step
        assert step == 3 or began[step + 1].wait(5)
    assert readers() == 1
    ahead.close()
    ahead.close()
    assert readers() == 0 and not began[4].is_set()


def test_steps_may_be_taken_twice_or_skipped() -> None:
    ahead = ReadAhead(lambda step: step, steps=range(3, 9))
    assert [ahead.take(step) for step in (3, 3, 5, 4, 8)] == [3, 3, 5, 4, 8]
    ahead.close()


def test_what_a_read_raises_is_raised_at_its_step() -> None:
    def read(step: int) -> int:
        if step == 2:
            raise KeyError("pair 7")
        return step

    ahead = ReadAhead(read, steps=range(1, 4))
    assert ahead.take(1) == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="pair 7"):
            ahead.take(2)
    ahead.close()
    assert readers() == 0


@pytest.mark.parametrize("computes_longer", [True, False])
def test_the_wait_for_the_batch_is_what_is_reported(computes_longer: bool) -> None:
    """A step that computes for longer than the next takes to read leaves nothing to wait for."""
    made, read_steps = batches(table=False), threading.Semaphore(0)

    def read(step: int) -> tuple[np.ndarray, Any]:
        time.sleep(0.3)
        indices = made.indices(step)[1]
        batch = made.batch(indices)
        read_steps.release()
        return indices, batch

    def train_step(batch: Any) -> StepResult:
        if computes_longer:
            assert read_steps.acquire(timeout=10) and read_steps.acquire(timeout=10)  # this step, and the next
            read_steps.release()
        return StepResult(np.ones((len(batch.groups), 1)), grad_norm=1.0, lr=0.1)

    run: Any = object.__new__(Run)
    run.ahead, run.train_set = ReadAhead(read, steps=range(1, 5)), made
    run.engine = SimpleNamespace(train_step=train_step)
    run.objective, run.metric_names = SimpleNamespace(head="lm"), ["loss"]
    run.args, run.store, run.profiler = SimpleNamespace(loss_type="dpo"), None, None
    run.shape, run.peak_tflops, run.device = ModelShape(1, 1, 1, 1, 1), 1.0, torch.device("cpu")
    with mock.patch("torch.distributed.get_world_size", return_value=1):
        run.train_step(1)
        metrics = run.train_step(2)
    run.ahead.close()
    assert metrics["perf/data_wait_s"] < 0.15 if computes_longer else metrics["perf/data_wait_s"] > 0.15
    assert metrics["perf/step_time_s"] >= metrics["perf/data_wait_s"]


# Evaluation


def test_evaluation_is_one_mean_over_every_pair() -> None:
    """Ten pairs in batches of 4, 4 and 2: a mean of means would give another number."""
    engine, made = Arithmetic(), batches(table=False)
    metrics = evaluate(engine, made, prefix="eval/dpo_")
    assert metrics["eval/dpo_loss"] == 4.5
    assert metrics.pop("eval/dpo_num_pairs") == PAIRS
    names = [metric.name for metric in engine.objective.metrics]
    assert metrics == {f"eval/dpo_{n}": 4.5 + i for i, n in enumerate(names) if not n.startswith("ref_")}
    dataset: Any = made.dataset
    assert sorted(dataset.read) == list(range(PAIRS))
