"""SimPO, AlphaPO, CPO and ORPO: known vectors, ends of the range, and values that are refused.

The vectors are of three pairs with log-probs (-10, -20), (-10, -20), (-30, -12) over (5, 10), (5, 10), (20, 4) tokens.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from relax.objectives import CPO, ORPO, AlphaPO, Objective, Scores, SimPO


def scores(values: list[float], lengths: list[float], *, dtype: torch.dtype = torch.float64) -> Scores:
    tensor = torch.tensor(values, dtype=dtype).requires_grad_()
    return Scores(tensor, torch.tensor(lengths, dtype=dtype), torch.arange(len(values) // 2).repeat_interleave(2))


KNOWN = scores([-10, -20, -10, -20, -30, -12], [5, 10, 5, 10, 20, 4])


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (SimPO(beta=2.0, gamma=1.0), (1.313261688, 1.313261688, 0.126928011)),
        (SimPO(beta=2.5, gamma=2.5 * 0.55), (1.600412652, 1.600412652, 0.088939465)),
        (CPO(), (2.313261688, 2.313261688, 3.452977611)),
        (CPO(nll_weight=0.0), (0.313261688, 0.313261688, 1.952977611)),
        (AlphaPO(), (1.313261688, 1.313261688, 0.013530059)),
        (ORPO(), (2.069314718, 2.069314718, 1.516756786)),
    ],
)
def test_known_vector(objective: Objective, expected: tuple[float, ...]) -> None:
    losses, metrics = objective(KNOWN)
    assert losses.tolist() == pytest.approx(expected, rel=1e-8)
    assert list(metrics) == [metric.name for metric in objective.metrics] and not objective.needs_reference
    assert metrics["logps_chosen"].tolist() == [-10, -10, -30]


def test_rewards_are_per_token_where_the_loss_is() -> None:
    _, metrics = SimPO(beta=2.0)(KNOWN)
    assert metrics["reward_chosen"].tolist() == [-4, -4, -3] and metrics["reward_rejected"].tolist() == [-4, -4, -6]
    _, metrics = CPO()(KNOWN)
    assert metrics["loss_nll"].tolist() == [2, 2, 1.5] and metrics["reward_margin"].tolist() == pytest.approx([1, 1, -1.8])


def test_odds_are_exact_at_both_ends() -> None:
    """A chosen completion that is sure, one that is nearly so, one that is hopeless: against mpmath's values."""
    for mean, log_odds in ((-1e-5, 11.512920464961896), (-0.6931471805599453, 0.0), (-3.0, -2.948930798), (-40.0, -40.0)):
        losses, _ = ORPO(weight=1.0)(scores([mean, -math.log(2)], [1, 1]))
        assert losses.item() == pytest.approx(-mean + math.log1p(math.exp(-log_odds)), rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("objective", [SimPO(), AlphaPO(), AlphaPO(alpha=-0.5), CPO(), ORPO()])
def test_far_log_probs_give_finite_losses_and_gradients(objective: Objective, dtype: torch.dtype) -> None:
    far = scores([0.0, -1e4, -1e4, 0.0, -1e4, -1e4, -1e-8, 0.0], [1] * 8, dtype=dtype)
    losses, _ = objective(far)
    (gradient,) = torch.autograd.grad(losses.sum(), far.values)
    assert losses.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("objective", [SimPO(), AlphaPO(), CPO(), ORPO()])
def test_swapping_the_completions_flips_the_margin(objective: Objective) -> None:
    def flipped(values: Tensor) -> list[float]:
        return values.view(-1, 2).flip(1).flatten().tolist()

    _, metrics = objective(KNOWN)
    _, other = objective(scores(flipped(KNOWN.values), flipped(KNOWN.lengths)))
    assert torch.equal(other["reward_margin"], -metrics["reward_margin"])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SimPO, {"beta": 0.0}, "beta must be a finite number above 0, got 0.0"),
        (SimPO, {"gamma": -1.0}, "gamma must be a finite number, at least 0"),
        (AlphaPO, {"alpha": 0.0}, "alpha must be a finite number other than 0, got 0.0: 0 is --loss-type simpo"),
        (CPO, {"nll_weight": math.nan}, "nll_weight must be a finite number"),
        (ORPO, {"weight": -0.1}, "weight must be a finite number above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(kind: Any, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
