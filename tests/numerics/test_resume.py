"""N steps are k steps, a checkpoint, and the N - k others in a new process: bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.backend.checkpoint.loading import CheckpointStore, find_checkpoint, load_checkpoint
from relax.backend.checkpoint.state import load_training_state, training_state
from relax.backend.engine import Engine, StepResult
from tests.engines import OPTIONS, assert_same, make_batch, make_engine, make_pairs, optimizer_tensors, parameters
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_process")

SIZES = [(7, 5, 9), (12, 1, 4), (1, 6, 6), (20, 3, 1), (4, 8, 2)]
STEPS, BEFORE = 5, 2
OBJECTIVE = {"experts": "dpo"}
SCHEDULE = replace(OPTIONS, decay_style="cosine", warmup_steps=1, min_lr=1e-5, total_steps=STEPS, clip_grad=1.0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dpo", "qwen3", tie_word_embeddings=True)
    save_tiny(root / "rm", "llama", head="scalar")
    save_tiny(root / "experts", "qwen3_moe")
    save_tiny(root / "other experts", "qwen3_moe", seed=1)
    save_tiny(root / "other dpo", "qwen3", tie_word_embeddings=True, seed=1)
    save_tiny(root / "other rm", "llama", head="scalar", seed=1)
    return {path.name: path for path in root.iterdir()}


def run(engine: Engine, steps: Sequence[int]) -> list[StepResult]:
    """Train on each step's own pairs."""
    results = []
    for step in steps:
        references = np.full((len(SIZES), 2), -25.0) if engine.objective.needs_reference else None
        results.append(engine.train_step(make_batch(make_pairs(SIZES, seed=step), references=references)))
    return results


def save(engine: Engine, directory: Path, *, optimizer: bool = True, rng: bool = True, background: bool = False) -> None:
    state = training_state(engine, step=BEFORE, optimizer=optimizer, rng=rng, loading=False)
    store = CheckpointStore(directory)
    store.save_checkpoint(step=BEFORE, state=state, files={"relax_run.json": {"step": BEFORE}}, async_save=background)
    if background:
        run(engine, [9])  # what training does meanwhile is not in the checkpoint
        store.finish_pending(blocking=True)


def restore(
    engine: Engine, directory: Path, *, optimizer: bool = True, rng: bool = True, saved: bool | None = None
) -> list[str]:
    """Load the checkpoint into a fresh engine; what changed of the schedule. saved: whether its optimizer was distributed."""
    info = find_checkpoint(directory, step=None, flag="--load")
    assert info is not None and info.step == BEFORE
    state = training_state(engine, step=info.step, optimizer=optimizer, rng=rng, loading=True, distributed=saved)
    return load_training_state(engine, load_checkpoint(info, state))


def everything(engine: Engine) -> dict[str, Any]:
    """Weights, master weights, moments and step counts, by name."""
    state = {str(key): tensor for key, tensor in optimizer_tensors(engine).items()}
    return {**parameters(engine), **state}


def numbers(results: Sequence[StepResult]) -> list[Any]:
    return [(result.values.tolist(), result.grad_norm, result.lr) for result in results]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["dpo", "rm", "experts"])
def test_a_resumed_run_continues_bit_for_bit(
    directories: dict[str, Path], tmp_path: Path, loss: str, dtype: torch.dtype, before: bool, after: bool
) -> None:
    """Also where its optimizer is distributed before and not after, or after alone."""
    options = replace(SCHEDULE, distributed=before, overlap=before)
    engine = make_engine(directories[loss], OBJECTIVE.get(loss, loss), dtype=dtype, options=options)
    run(engine, range(BEFORE))
    save(engine, tmp_path)
    saved, schedule = everything(engine), engine.scheduler.state_dict()
    expected = run(engine, range(BEFORE, STEPS))
    assert len({result.lr for result in expected}) == STEPS - BEFORE

    # A new process starts from other weights; all of them come from the checkpoint.
    options = replace(SCHEDULE, distributed=after, overlap=after)
    resumed = make_engine(directories[f"other {loss}"], OBJECTIVE.get(loss, loss), dtype=dtype, options=options)
    assert restore(resumed, tmp_path, saved=before) == []
    assert_same(everything(resumed), saved)
    assert resumed.scheduler.state_dict() == schedule
    assert numbers(run(resumed, range(BEFORE, STEPS))) == numbers(expected)
    assert_same(everything(resumed), everything(engine))
    assert resumed.scheduler.state_dict() == engine.scheduler.state_dict()


@pytest.mark.parametrize("distributed", [False, True])
def test_saving_changes_nothing_of_the_run(directories: dict[str, Path], tmp_path: Path, distributed: bool) -> None:
    options = replace(SCHEDULE, distributed=distributed)
    results = []
    for saves in (False, True):
        engine = make_engine(directories["dpo"], "dpo", dtype=torch.bfloat16, options=options)
        first = run(engine, range(BEFORE))
        if saves:
            save(engine, tmp_path)
        results.append((numbers(first + run(engine, range(BEFORE, STEPS))), everything(engine)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_a_background_save_holds_the_step_it_was_asked_at(directories: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(directories["dpo"], "dpo", options=SCHEDULE)
    run(engine, range(BEFORE))
    saved = everything(engine)
    save(engine, tmp_path, background=True)
    resumed = make_engine(directories["other dpo"], "dpo", options=SCHEDULE)
    restore(resumed, tmp_path)
    assert_same(everything(resumed), saved)


def draws() -> list[float]:
    return [float(torch.rand(1)), np.random.rand(), float(np.random.normal()), random.random(), random.gauss(0, 1)]


def test_random_states_continue(directories: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(directories["rm"], "rm", options=SCHEDULE)
    draws()  # numpy and Python now hold half of a normal pair
    save(engine, tmp_path, optimizer=False)
    expected = draws()
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    restore(engine, tmp_path, optimizer=False)
    assert draws() == expected


@pytest.mark.parametrize("distributed", [False, True])
def test_flags_win_over_the_checkpoints_schedule(directories: dict[str, Path], tmp_path: Path, distributed: bool) -> None:
    options = replace(SCHEDULE, decay_style="constant", distributed=distributed)
    engine = make_engine(directories["dpo"], "dpo", options=options)
    run(engine, range(BEFORE))
    save(engine, tmp_path)
    saved = optimizer_tensors(engine)

    changed = replace(options, lr=5e-4, weight_decay=0.3, beta2=0.99)
    resumed = make_engine(directories["dpo"], "dpo", options=changed)
    assert restore(resumed, tmp_path) == ["max_lr 0.001 -> 0.0005"]
    assert_same(optimizer_tensors(resumed), saved)  # moments and steps are the checkpoint's
    assert [result.lr for result in run(resumed, range(BEFORE, STEPS))] == [5e-4] * (STEPS - BEFORE)
    for group in resumed.optimizer.param_groups:
        assert group["lr"] == 5e-4 and tuple(group["betas"]) == (0.9, 0.99)
        assert group["weight_decay"] == (0.3 if group["wd_mult"] else 0.0)


def test_a_longer_run_is_a_changed_schedule(directories: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine(directories["rm"], "rm", options=SCHEDULE)
    run(engine, range(BEFORE))
    save(engine, tmp_path)
    longer = replace(SCHEDULE, total_steps=2 * STEPS)
    resumed = make_engine(directories["rm"], "rm", options=longer)
    changes = restore(resumed, tmp_path)
    assert [change for change in changes if "lr_decay_steps" in change] == [f"lr_decay_steps {STEPS} -> {2 * STEPS}"]
    whole = make_engine(directories["rm"], "rm", options=longer)
    assert [r.lr for r in run(resumed, range(BEFORE, 4))] == [r.lr for r in run(whole, range(4))][BEFORE:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributed", [False, True])
def test_without_optimizer_state_the_masters_are_the_loaded_weights(
    directories: dict[str, Path], tmp_path: Path, dtype: torch.dtype, distributed: bool
) -> None:
    options = replace(SCHEDULE, distributed=distributed)
    engine = make_engine(directories["dpo"], "dpo", dtype=dtype, options=options)
    run(engine, range(BEFORE))
    save(engine, tmp_path, optimizer=False, rng=False)
    resumed = make_engine(directories["other dpo"], "dpo", dtype=dtype, options=options)
    assert restore(resumed, tmp_path, optimizer=False, rng=False) == []
    assert_same(parameters(resumed), parameters(engine))
    run(resumed, [5])  # the warm-up's first step: a learning rate of 0 writes the masters back unchanged
    assert_same(parameters(resumed), parameters(engine))
    assert run(resumed, [6])[0].lr == SCHEDULE.lr
    changed = [n for n, tensor in parameters(resumed).items() if not torch.equal(tensor, parameters(engine)[n])]
    assert len(changed) > 5
