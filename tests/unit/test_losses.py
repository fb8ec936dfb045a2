"""Known vectors, gradients, fixed points and symmetries of the losses, in fp64."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from relax.losses import DPO, LOSSES, PairScores, RewardModel

LN2 = 0.6931471805599453


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


KNOWN = PairScores(
    chosen=vector(-0.5, -10, -1),
    rejected=vector(-0.1, -30, -21),
    ref_chosen=vector(-0.5, -10.1, -0.1),
    ref_rejected=vector(-0.1, -20.1, -0.1),
)


def gradients(loss, **fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the summed loss at zero scores, with respect to (chosen, rejected)."""
    chosen, rejected = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses, _ = loss(PairScores(chosen=chosen, rejected=rejected, **fixed))
    losses.sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    return chosen.grad, rejected.grad


def swapped(scores: PairScores) -> PairScores:
    return PairScores(
        chosen=scores.rejected,
        rejected=scores.chosen,
        ref_chosen=scores.ref_rejected,
        ref_rejected=scores.ref_chosen,
    )


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
    losses, metrics = DPO()(PairScores(chosen=logps, rejected=other, ref_chosen=logps, ref_rejected=other))
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
    losses, metrics = loss(PairScores(chosen=KNOWN.chosen, rejected=KNOWN.rejected))
    assert not loss.needs_reference and not any(name.startswith("ref_") for name in metrics)
    assert_close(metrics["reward_chosen"], 0.1 * KNOWN.chosen)
    assert_close(losses, torch.log1p(torch.exp(-0.1 * (KNOWN.chosen - KNOWN.rejected))))
    assert torch.equal(loss(KNOWN)[0], losses), "a given reference plays no part"


def test_dpo_without_reference_scores_is_refused():
    with pytest.raises(ValueError, match="ref_chosen and ref_rejected"):
        DPO()(PairScores(chosen=vector(0), rejected=vector(0)))


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_dpo_refuses_a_bad_beta(beta: float):
    with pytest.raises(ValueError, match="beta must be a finite number above 0"):
        DPO(beta=beta)


def test_rm_known_vector():
    losses, metrics = RewardModel()(PairScores(chosen=vector(0, 1, 2, 0), rejected=vector(0, 0, 0, 1)))
    assert_close(losses, vector(0.693147, 0.313262, 0.126928, 1.313262), rtol=0, atol=1e-6)
    assert metrics["score_margin"].tolist() == [0, 1, 2, -1]
    assert metrics["strict_accuracy"].tolist() == [0, 1, 1, 0]
    assert metrics["tie_rate"].tolist() == [1, 0, 0, 0]
    assert metrics["tie_aware_accuracy"].tolist() == [0.5, 1, 1, 0]


def test_rm_equal_scores_give_ln_two_and_half_gradients():
    losses, _ = RewardModel()(PairScores(chosen=vector(-7, 0, 3), rejected=vector(-7, 0, 3)))
    assert losses.tolist() == [LN2] * 3
    chosen, rejected = gradients(RewardModel())
    assert chosen.tolist() == [-0.5] * 3 and rejected.tolist() == [0.5] * 3


def test_rm_margin_moves_the_loss_and_not_the_metrics():
    scores = PairScores(chosen=vector(3, 1), rejected=vector(1, 1), margin=vector(2, 0))
    losses, metrics = RewardModel()(scores)
    assert losses.tolist() == [LN2, LN2]
    assert metrics["score_margin"].tolist() == [2, 0] and metrics["strict_accuracy"].tolist() == [1, 0]


def test_rm_constant_shift_changes_nothing():
    chosen, rejected = vector(0.25, -1.5, 4), vector(1, -2, 4)
    plain, metrics = RewardModel()(PairScores(chosen=chosen, rejected=rejected))
    shifted, shifted_metrics = RewardModel()(PairScores(chosen=chosen + 8, rejected=rejected + 8))
    assert torch.equal(plain, shifted)
    assert torch.equal(metrics["score_margin"], shifted_metrics["score_margin"])
    assert torch.equal(metrics["tie_aware_accuracy"], shifted_metrics["tie_aware_accuracy"])


def test_fixed_point_of_three_to_one_labels():
    """Where three of four raters agree the best margin is ln 3: loss 0.562335, no net gradient (numerics.md)."""
    margin = torch.tensor(math.log(3), dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(4, dtype=torch.float64)
    chosen, rejected = torch.stack([margin] * 3 + [margin * 0]), torch.stack([margin * 0] * 3 + [margin])
    for losses, _ in (
        RewardModel()(PairScores(chosen=chosen, rejected=rejected)),
        DPO(beta=0.1)(PairScores(chosen=chosen * 10, rejected=rejected * 10, ref_chosen=zero, ref_rejected=zero)),
    ):
        assert_close(losses.mean().item(), 0.562335, rtol=0, atol=1e-6)
        (gradient,) = torch.autograd.grad(losses.mean(), margin, retain_graph=True)
        assert_close(gradient.item(), 0.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("loss", "margin"), [(DPO(), "reward_margin"), (RewardModel(), "score_margin")])
def test_swapping_the_answers_flips_the_margin(loss, margin: str):
    _, metrics = loss(KNOWN)
    _, flipped = loss(swapped(KNOWN))
    assert torch.equal(flipped[margin], -metrics[margin])
    assert torch.equal(flipped["tie_aware_accuracy"], 1 - metrics["tie_aware_accuracy"])


@pytest.mark.parametrize("loss", [DPO(), DPO(reference_free=True), RewardModel()])
def test_metrics_are_detached_named_and_per_pair(loss):
    scores = dataclasses.replace(KNOWN, chosen=KNOWN.chosen.clone().requires_grad_())
    losses, metrics = loss(scores)
    assert tuple(metrics) == loss.metric_names and loss.metric_names[0] == "loss"
    assert all(value.shape == (3,) and not value.requires_grad for value in metrics.values())
    assert losses.requires_grad and torch.equal(metrics["loss"], losses.detach())


def test_metric_names_follow_the_contract():
    accuracy = ("strict_accuracy", "tie_rate", "tie_aware_accuracy")
    rewards = ("reward_chosen", "reward_rejected", "reward_margin")
    logps = ("loss", "logps_chosen", "logps_rejected")
    assert DPO().metric_names == (*logps, "ref_logps_chosen", "ref_logps_rejected", *rewards, *accuracy)
    assert DPO(reference_free=True).metric_names == (*logps, *rewards, *accuracy)
    assert RewardModel().metric_names == ("loss", "score_chosen", "score_rejected", "score_margin", *accuracy)


def test_registry_builds_losses_whose_fields_are_documented():
    assert list(LOSSES.items()) == [("dpo", DPO), ("rm", RewardModel)]
    assert (DPO.head, RewardModel.head) == ("lm", "scalar")
    assert DPO() == DPO(beta=0.1, reference_free=False) and DPO().needs_reference
    assert not RewardModel().needs_reference
    for loss in LOSSES.values():
        assert all(hyper_parameter.metadata["help"] for hyper_parameter in dataclasses.fields(loss))


def test_no_pairs_give_no_losses():
    empty = torch.zeros(0)
    losses, metrics = DPO()(PairScores(chosen=empty, rejected=empty, ref_chosen=empty, ref_rejected=empty))
    assert losses.shape == (0,) and all(value.shape == (0,) for value in metrics.values())
