"""Objectives that couple a batch: the same step whatever the packing, the whole batch's gradient, and what they remember."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest

from relax.objectives import DPO
from relax.packing import MicroBatch, StepPlan, plan_step
from tests.engines import SIZES, assert_near, gradients, lengths_of, make_batch, make_engine, make_pairs
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_process")

LOSSES = ("aot", "aot_unpaired", "bco", "beta_dpo", "sigmoid,aot:0.5,nll:0.1")
EVERYONE = tuple(range(len(SIZES)))
WHOLE = StepPlan(((MicroBatch(EVERYONE, (False,) * len(SIZES)),),))
PLANS = {
    "a micro-batch per pair": StepPlan((tuple(MicroBatch((i,), (False,)) for i in EVERYONE),)),
    "a small budget": plan_step(lengths_of(make_pairs(SIZES)), max_tokens=40),
    "an empty micro-batch": StepPlan(((*WHOLE.ranks[0], MicroBatch()),)),
}


@dataclass(frozen=True, slots=True)
class Direct(DPO):
    """The same loss, differentiated where it is computed: right where one micro-batch holds all pairs."""

    @property
    def coupled(self) -> bool:
        return False


def objective(kind: type[DPO], loss: str) -> DPO:
    return kind(loss=loss, beta=0.1, shift="running" if loss == "bco" else None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(directory, "qwen3")
    return directory


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_that_of_the_whole_batch_whatever_the_packing(directory: Path, loss: str) -> None:
    references = np.random.default_rng(0).normal(-25, 10, (len(SIZES), 2)).astype(np.float32)
    pairs = make_pairs(SIZES)
    direct = make_engine(directory, objective(Direct, loss))
    expected = direct.train_step(make_batch(pairs, plan=WHOLE, references=references))
    assert not direct.objective_state or set(direct.objective_state.values()) == {0.0}
    states = []
    for name, plan in {"one micro-batch": WHOLE, **PLANS}.items():
        engine = make_engine(directory, objective(DPO, loss))
        batch = make_batch(pairs, plan=plan, references=references)
        evaluated = engine.evaluate(batch)
        result = engine.train_step(batch)
        assert (result.values == evaluated).all()
        np.testing.assert_allclose(result.values, expected.values, rtol=1e-5, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(result.values[:, 0].mean(), expected.values[:, 0].mean(), rtol=1e-6, err_msg=name)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert_near(gradients(engine), gradients(direct), tolerance=1e-5)
        states.append(engine.objective_state)
    assert all(state == pytest.approx(states[0], rel=1e-6) for state in states)
    assert (loss in ("bco", "beta_dpo")) == any(states[0].values())


def test_the_next_step_goes_from_what_is_remembered(directory: Path) -> None:
    references = np.full((len(SIZES), 2), -25.0, dtype=np.float32)
    engine = make_engine(directory, objective(DPO, "beta_dpo"))
    batch = make_batch(make_pairs(SIZES), references=references)
    first = engine.evaluate(batch)[:, 0]
    engine.objective_state = {"margin_mean": 0.5}
    assert (engine.evaluate(batch)[:, 0] != first).any() and engine.objective_state == {"margin_mean": 0.5}


def test_an_objective_of_pairs_alone_is_not_scored_twice() -> None:
    assert not DPO().coupled and not DPO(loss="sigmoid,bco,nll", beta=0.1).coupled
    assert {field.name for field in fields(Direct)} == {field.name for field in fields(DPO)}
