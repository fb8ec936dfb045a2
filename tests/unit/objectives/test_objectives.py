"""Known vectors, gradients, fixed points and symmetries of the objectives, in fp64."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from relax.objectives import DPO, OBJECTIVES, Metric, RewardModel, Scores, with_role

LN2 = 0.6931471805599453


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def side_by_side(chosen: Tensor, rejected: Tensor) -> Tensor:
    return torch.stack((chosen, rejected), 1).flatten()


def pairs(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    **columns: Tensor,
) -> Scores:
    """Scores of pairs, each side [num_pairs]."""
    return Scores(
        values=side_by_side(chosen, rejected),
        lengths=torch.ones(2 * len(chosen), dtype=torch.float64),
        group=torch.arange(len(chosen)).repeat_interleave(2),
        reference=None if ref_chosen is None or ref_rejected is None else side_by_side(ref_chosen, ref_rejected),
        columns=columns,
    )


CHOSEN, REJECTED = vector(-0.5, -10, -1), vector(-0.1, -30, -21)
REF_CHOSEN, REF_REJECTED = vector(-0.5, -10.1, -0.1), vector(-0.1, -20.1, -0.1)
KNOWN = pairs(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
SWAPPED = pairs(REJECTED, CHOSEN, REF_REJECTED, REF_CHOSEN)


def gradients(loss, **fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the summed loss at zero scores, with respect to (chosen, rejected)."""
    chosen, rejected = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses, _ = loss(pairs(chosen, rejected, **fixed))
    losses.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    return chosen.grad, rejected.grad


def test_dpo_known_vector():
    losses, metrics = DPO(beta=0.1)(KNOWN)
    assert_close(losses, vector(0.693147, 0.313262, 0.126928), rtol=0, atol=1e-6)
    assert_close(metrics["reward_chosen"], vector(0, 0.01, -0.09))
    assert_close(metrics["reward_rejected"], vector(0, -0.99, -2.09))
    assert_close(metrics["reward_margin"], vector(0, 1, 2))
    assert metrics["ref_logps_chosen"].tolist() == [-0.5, -10.1, -0.1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_step_zero_is_exactly_ln_two(dtype: torch.dtype):
    logps = torch.tensor([-512.3, -0.07, -91.1], dtype=dtype)
    other = torch.tensor([-3.1, -700.9, -0.2], dtype=dtype)
    losses, metrics = DPO()(pairs(logps, other, logps, other))
    assert losses.tolist() == torch.full((3,), LN2, dtype=dtype).tolist()
    assert metrics["tie_aware_accuracy"].tolist() == [0.5, 0.5, 0.5]
    assert metrics["strict_accuracy"].tolist() == [0, 0, 0] and metrics["tie_rate"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_gradients_at_step_zero(beta: float):
    zeros = torch.zeros(3, dtype=torch.float64)
    chosen, rejected = gradients(DPO(beta=beta), ref_chosen=zeros, ref_rejected=zeros)
    assert chosen.tolist() == [-beta / 2] * 3 and rejected.tolist() == [beta / 2] * 3


def test_dpo_reference_free_rewards_are_beta_times_logps():
    loss = DPO(beta=0.1, reference_free=True)
    losses, metrics = loss(pairs(CHOSEN, REJECTED))
    assert not loss.needs_reference and not any(name.startswith("ref_") for name in metrics)
    assert_close(metrics["reward_chosen"], 0.1 * CHOSEN)
    assert_close(losses, torch.log1p(torch.exp(-0.1 * (CHOSEN - REJECTED))))
    assert torch.equal(loss(KNOWN)[0], losses), "a given reference plays no part"


def test_dpo_without_reference_scores_is_refused():
    with pytest.raises(ValueError, match="needs the reference's scores"):
        DPO()(pairs(vector(0), vector(0)))


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_dpo_refuses_a_bad_beta(beta: float):
    with pytest.raises(ValueError, match="beta must be a finite number above 0"):
        DPO(beta=beta)


def test_rm_known_vector():
    losses, metrics = RewardModel()(pairs(vector(0, 1, 2, 0), vector(0, 0, 0, 1)))
    assert_close(losses, vector(0.693147, 0.313262, 0.126928, 1.313262), rtol=0, atol=1e-6)
    assert metrics["score_margin"].tolist() == [0, 1, 2, -1]
    assert metrics["strict_accuracy"].tolist() == [0, 1, 1, 0]
    assert metrics["tie_rate"].tolist() == [1, 0, 0, 0]
    assert metrics["tie_aware_accuracy"].tolist() == [0.5, 1, 1, 0]


def test_rm_equal_scores_give_ln_two_and_half_gradients():
    losses, _ = RewardModel()(pairs(vector(-7, 0, 3), vector(-7, 0, 3)))
    assert losses.tolist() == [LN2] * 3
    chosen, rejected = gradients(RewardModel())
    assert chosen.tolist() == [-0.5] * 3 and rejected.tolist() == [0.5] * 3


def test_rm_margin_moves_the_loss_and_not_the_metrics():
    scores = pairs(vector(3, 1), vector(1, 1), margin=vector(2, 0))
    losses, metrics = RewardModel()(scores)
    assert losses.tolist() == [LN2, LN2]
    assert metrics["score_margin"].tolist() == [2, 0] and metrics["strict_accuracy"].tolist() == [1, 0]


def test_rm_constant_shift_changes_nothing():
    chosen, rejected = vector(0.25, -1.5, 4), vector(1, -2, 4)
    plain, metrics = RewardModel()(pairs(chosen, rejected))
    shifted, shifted_metrics = RewardModel()(pairs(chosen + 8, rejected + 8))
    assert torch.equal(plain, shifted)
    assert torch.equal(metrics["score_margin"], shifted_metrics["score_margin"])
    assert torch.equal(metrics["tie_aware_accuracy"], shifted_metrics["tie_aware_accuracy"])


def test_fixed_point_of_three_to_one_labels():
    """Where three of four raters agree the best margin is ln 3: loss 0.562335, no net gradient (numerics.md)."""
    margin = torch.tensor(math.log(3), dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(4, dtype=torch.float64)
    chosen, rejected = torch.stack([margin] * 3 + [margin * 0]), torch.stack([margin * 0] * 3 + [margin])
    for losses, _ in (
        RewardModel()(pairs(chosen, rejected)),
        DPO(beta=0.1)(pairs(chosen * 10, rejected * 10, zero, zero)),
    ):
        assert_close(losses.mean().item(), 0.562335, rtol=0, atol=1e-6)
        (gradient,) = torch.autograd.grad(losses.mean(), margin, retain_graph=True)
        assert_close(gradient.item(), 0.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("loss", "margin"), [(DPO(), "reward_margin"), (RewardModel(), "score_margin")])
def test_swapping_the_completions_flips_the_margin(loss, margin: str):
    _, metrics = loss(KNOWN)
    _, flipped = loss(SWAPPED)
    assert torch.equal(flipped[margin], -metrics[margin])
    assert torch.equal(flipped["tie_aware_accuracy"], 1 - metrics["tie_aware_accuracy"])


@pytest.mark.parametrize("loss", [DPO(), DPO(reference_free=True), RewardModel()])
def test_metrics_are_as_declared_and_per_pair(loss):
    losses, metrics = loss(dataclasses.replace(KNOWN, values=KNOWN.values.clone().requires_grad_()))
    assert list(metrics) == list(names(loss)) and loss.metrics[0] == Metric("loss", "loss", better="lower")
    assert all(value.shape == (3,) for value in metrics.values())
    assert losses.requires_grad and torch.equal(metrics["loss"], losses)


def names(objective) -> tuple[str, ...]:
    return tuple(metric.name for metric in objective.metrics)


def test_metric_names_follow_the_contract():
    accuracy = ("strict_accuracy", "tie_rate", "tie_aware_accuracy")
    rewards = ("reward_chosen", "reward_rejected", "reward_margin")
    logps = ("loss", "logps_chosen", "logps_rejected")
    assert names(DPO()) == (*logps, "ref_logps_chosen", "ref_logps_rejected", "chosen_fell_rate", *rewards, *accuracy)
    assert names(DPO(reference_free=True)) == (*logps, *rewards, *accuracy)
    assert names(RewardModel()) == ("loss", "score_chosen", "score_rejected", "score_margin", *accuracy)


@pytest.mark.parametrize("objective", [DPO(), DPO(reference_free=True), RewardModel()])
def test_what_a_metric_is_for_is_declared_once(objective):
    """Each objective has one loss, margin and accuracy, which the headline shows, and one share of pairs ranked right."""
    for role in ("loss", "margin", "strict", "ties", "accuracy"):
        assert len(with_role(objective.metrics, role)) == 1, role
    assert [metric.name for metric in with_role(objective.metrics, "margin", "strict")][0].endswith("_margin")
    reference = [metric.name for metric in with_role(objective.metrics, "reference")]
    assert reference == (["ref_logps_chosen", "ref_logps_rejected"] if objective.needs_reference else [])


def test_registry_builds_losses_whose_fields_are_documented():
    assert list(OBJECTIVES) == ["dpo", "rm", "simpo", "alphapo", "cpo", "orpo"]
    assert (DPO.head, RewardModel.head) == ("lm", "scalar")
    assert DPO() == DPO(beta=0.1, reference_free=False) and DPO().needs_reference
    assert not RewardModel().needs_reference
    for loss in OBJECTIVES.values():
        assert all(hyper_parameter.metadata["help"] for hyper_parameter in dataclasses.fields(loss))


def test_no_pairs_give_no_losses():
    empty = torch.zeros(0)
    losses, metrics = DPO()(pairs(empty, empty, empty, empty))
    assert losses.shape == (0,) and all(value.shape == (0,) for value in metrics.values())
