"""Whole epochs of a real model: the reference pass, the steps it serves, evaluation; and settings that must not show."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.backend.engine import Batch, Engine
from relax.metrics import group_means
from relax.reference.fill import fill_table, open_table
from relax.reference.table import ReferenceTable
from relax.training.batches import Batches, Packing, ReadAhead, evaluate
from tests.engines import (
    CPU,
    OPTIONS,
    assert_near,
    assert_same,
    column,
    gradients,
    lengths_of,
    make_batch,
    make_engine,
    make_pairs,
    parameters,
)
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_process")

LN2 = 0.6931471805599453
STILL = replace(OPTIONS, lr=0.0, weight_decay=0.0)  # the policy stays its reference
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Dataset:
    """Eleven pairs of mixed lengths in memory."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.pairs = make_pairs([tuple(size) for size in rng.integers(1, 20, (11, 3))])
        self.lengths, self.columns = lengths_of(self.pairs), {}
        self.num_completions, self.ranks = 2, None
        self.fingerprint = self.scored_fingerprint = "ab"
        self.hashes = rng.integers(0, 256, (11, 16), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


def make_batches(*, batch_size: int = 4, shuffle: bool = True, max_tokens: int = 60, share_prompt: bool = True) -> Batches:
    packing = Packing(
        dp_size=1, max_tokens=max_tokens, share_prompt=share_prompt, microbatch_multiple=1, area_cost=1 / 288, row_multiple=1
    )
    dataset: Any = Dataset()
    made = Batches(dataset=dataset, packing=packing, batch_size=batch_size, seed=3, shuffle=shuffle)
    made.table = ReferenceTable(dataset.hashes, width=2, path=None)
    return made


def filled(engine: Engine, **options: Any) -> Batches:
    made = make_batches(**options)
    fill_table(engine, made, steps=range(1, made.steps_per_epoch + 1), after_each=lambda: None)
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny(directory, "qwen3", tie_word_embeddings=True)
    return directory


@DTYPES
@pytest.mark.parametrize("share", [True, False])
def test_the_first_epoch_equals_its_reference_bit_for_bit(directory: Path, dtype: torch.dtype, share: bool) -> None:
    engine = make_engine(directory, "dpo", dtype=dtype, options=STILL)
    made = filled(engine, share_prompt=share)
    plans = [made.packing.plan(made.dataset.lengths[indices]).ranks[0] for indices in made.epoch()]
    assert [len(indices) for indices in made.epoch()] == [4, 4, 3] and max(map(len, plans)) > 1
    for step in (1, 2, 3):
        result = engine.train_step(made.batch(made.indices(step)[1]))
        assert (column(engine, result.values, "loss") == LN2).all()
        assert (column(engine, result.values, "logps_chosen") == column(engine, result.values, "ref_logps_chosen")).all()
        assert (column(engine, result.values, "reward_margin") == 0).all()
        assert result.grad_norm > 0


def test_a_step_laid_out_ahead_in_a_thread_has_the_same_bits(directory: Path) -> None:
    results = []
    for ahead in (False, True):
        engine = make_engine(directory, "dpo")
        made = filled(engine)

        def read(step: int, made: Batches = made, engine: Any = engine) -> Batch:
            batch = made.batch(made.indices(step)[1])
            return replace(batch, layouts=engine.lay_out(batch))

        reader = ReadAhead(read, steps=range(1, 6))
        steps = [engine.train_step(reader.take(s) if ahead else made.batch(made.indices(s)[1])) for s in range(1, 6)]
        reader.close()
        results.append([(step.values.tolist(), step.grad_norm) for step in steps])
    assert results[0] == results[1]


def test_a_later_run_finds_the_table_and_another_identity_does_not(directory: Path, tmp_path: Path) -> None:
    """The first run stops after one step; numbers are shared by runs that would compute the same bits, and no others."""
    engine = make_engine(directory, "dpo", options=None)

    def missing(*, sha256: str = "cd", steps: range = range(0), **options: Any) -> list[int]:
        made = make_batches(**options)
        open_table(engine, made, reference_sha256=sha256, directory=tmp_path)
        assert made.table is not None
        fill_table(engine, made, steps=steps, after_each=lambda: None)
        return made.table.missing(np.arange(11)).tolist()

    done = make_batches().indices(1)[1]
    rest = [i for i in range(11) if i not in done]
    assert missing(steps=range(1, 2)) == rest
    assert missing() == rest
    for other in ({"sha256": "ef"}, {"batch_size": 3}, {"shuffle": False}, {"max_tokens": 61}, {"share_prompt": False}):
        assert missing(**other) == list(range(11))
    assert missing(steps=range(1, 4)) == missing() == []


@DTYPES
def test_evaluation_before_the_first_step_is_exactly_a_tie(directory: Path, dtype: torch.dtype) -> None:
    engine = make_engine(directory, "dpo", dtype=dtype)
    metrics = evaluate(engine, filled(engine, shuffle=False), prefix="eval/dpo_")
    assert metrics["eval/dpo_loss"] == LN2
    assert metrics["eval/dpo_reward_margin"] == metrics["eval/dpo_strict_accuracy"] == 0.0
    assert metrics["eval/dpo_tie_rate"] == 1.0 and metrics["eval/dpo_tie_aware_accuracy"] == 0.5
    assert metrics["eval/dpo_num_pairs"] == 11


def test_evaluation_does_not_depend_on_its_batches(directory: Path) -> None:
    engine = make_engine(directory, "dpo")
    table = filled(engine).table
    assert table is not None
    table.values += np.random.default_rng(0).normal(0, 3, table.values.shape).astype(np.float32)
    found = []
    for size, tokens in ((4, 60), (1, 60), (11, 1000), (7, 40)):
        made = make_batches(batch_size=size, shuffle=False, max_tokens=tokens)
        made.table = table
        found.append(evaluate(engine, made, prefix=""))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)
    assert 0 < found[0]["strict_accuracy"] < 1


def test_training_metrics_are_means_over_the_pairs(directory: Path) -> None:
    engine = make_engine(directory, "dpo")
    made = filled(engine)
    assert made.table is not None
    made.table.values -= np.arange(22, dtype=np.float32).reshape(11, 2)
    result = engine.train_step(made.batch(made.indices(1)[1]))
    metrics = group_means(result.values, [metric.name for metric in engine.objective.metrics], prefix="train/dpo/")
    margins = column(engine, result.values, "reward_margin")
    assert metrics["train/dpo/loss"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-12)
    assert metrics["train/dpo/strict_accuracy"] == (margins > 0).mean()


# Settings that must not show


@pytest.fixture
def gradients_of(directory: Path) -> Callable[..., Any]:
    """(losses, norm, gradients, weights) of one step with given engine settings."""

    def run(**overrides: Any) -> Any:
        engine = make_engine(directory, "dpo", options=None)
        other = Engine(
            engine.hf_config, objective=engine.objective, device=CPU, dtype=torch.float32, parallel=engine.parallel, **overrides
        )
        other.chunks[0].load_state_dict(engine.chunks[0].state_dict())
        other.prepare_training(OPTIONS)
        batch = make_batch(make_pairs([(7, 5, 9), (12, 1, 4), (1, 6, 6)]), references=np.full((3, 2), -30.0))
        result = other.train_step(batch)
        return result.values, result.grad_norm, gradients(other), parameters(other)

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_recomputation_changes_no_bit(gradients_of: Callable[..., Any], settings: dict[str, Any]) -> None:
    (values, norm, grads, weights), (found, found_norm, found_grads, found_weights) = gradients_of(), gradients_of(**settings)
    assert (found == values).all() and found_norm == norm
    assert_same(found_grads, grads)
    assert_same(found_weights, weights)


def test_bf16_is_fp32_up_to_rounding(directory: Path) -> None:
    """The same weights, rounded once: scores, gradient norm and every gradient agree to a few of bf16's 2**-8."""
    results, grads = [], []
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(directory, "dpo", dtype=dtype)
        batch = make_batch(make_pairs([(7, 5, 9), (12, 1, 4), (1, 6, 6)]), references=np.full((3, 2), -30.0))
        results.append(engine.train_step(batch))
        grads.append({name: p.main_grad.clone() for name, p in engine.chunks[0].named_parameters()})
    wide, narrow = results
    np.testing.assert_allclose(narrow.values[:, 1:3], wide.values[:, 1:3], rtol=0.01, atol=0.05)
    assert narrow.grad_norm == pytest.approx(wide.grad_norm, rel=0.05)
    assert {grad.dtype for grad in grads[1].values()} == {torch.float32}  # summed over micro-batches in fp32
    assert_near(grads[1], grads[0], tolerance=0.1)
