"""The terms of `--dpo-loss`: known vectors, step-0 constants and gradients, bounds, and mixes that are refused.

The vectors are of three pairs: policy log-probs (-10, -20), (-10, -20), (-30, -12), reference log-probs (-10, -20), (-12, -18),
(-25, -15), so that u - v is 0, 4, -8.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from relax.objectives import DPO, Scores
from relax.objectives.terms import TERMS


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ZERO_STATE = {"bco_mean": 0.0, "bco_count": 0.0, "margin_mean": 0.0}
VALUES = vector(-10, -20, -10, -20, -30, -12)
SCORES = Scores(
    values=VALUES,
    lengths=vector(5, 10, 5, 10, 20, 4),
    group=torch.tensor([0, 0, 1, 1, 2, 2]),
    reference=vector(-10, -20, -12, -18, -25, -15),
    columns={"margin": vector(1, 1, 1)},
    state={"bco_mean": 0.0, "bco_count": 0.0, "margin_mean": 0.2},
)
LN2 = math.log(2)
KNOWN: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "sigmoid": ({}, (0.693147181, 0.513015252, 1.171100666)),
    "cdpo": ({}, (0.693147181, 0.553015252, 1.091100666)),
    "robust": ({}, (0.693147181, 0.463015252, 1.271100666)),
    "ipo_sum": ({}, (25, 1, 169)),
    "ipo_mean": ({}, (25, 19.36, 36)),
    "hinge": ({}, (1, 0.6, 1.8)),
    "sigmoid_norm": ({}, (0.693147181, 0.048587352, 5.006715348)),
    "apo_zero": ({}, (1, 0.900332005, 1.196901848)),
    "apo_down": ({}, (1, 0.951146337, 1.067515150)),
    "exo": ({}, (2.761230709, 2.099226233, 4.147363964)),
    "nca": ({"beta": 0.1}, (1.386294361, 1.296277739, 1.638293099)),
    "bco": ({"beta": 0.1}, (1.386294361, 1.196277739, 1.828432229)),
    "sppo_hard": ({"beta": 0.1}, (50, 18, 164)),
    "discopop": ({"beta": 0.1}, (0.846573590, 0.670267294, 1.171100785)),
    "odpo": ({"offset": "identity"}, (1.313261688, 1.037487950, 1.952977611)),
    "dpop": ({}, (0.693147181, 0.513015252, 3.336219259)),
    "rdpo": ({}, (0.718459648, 0.533382155, 1.063496510)),
    "aot": ({"beta": 0.1}, (0.513015252, 0.693147181, 1.171100666)),
    "aot_unpaired": ({"beta": 0.1}, (0.693147181, 0.744396660, 0.854355244)),
    "beta_dpo": ({}, (0.693147181, 0.545892937, 1.063496510)),
    "wpo": ({"beta": 0.1}, tuple(math.exp(-n) * x for n, x in ((4, LN2), (4, 0.5130152524), (4.5, 1.1711006659)))),
}


@pytest.mark.parametrize("name", [name for name in TERMS if "beta" in TERMS[name].defaults])
def test_known_vector(name: str) -> None:
    settings, expected = KNOWN[name]
    losses, metrics = DPO(loss=name, **settings)(SCORES)
    assert losses.tolist() == pytest.approx(expected, rel=1e-8)
    assert torch.equal(metrics["loss"], losses)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss": "exo", "label_smoothing": 0.1}, (0.510825624, 0.313593664, 1.002268322)),
        ({"loss": "sigmoid:0.8,bco:0.2,nll:1", "beta": 0.1}, (2.831776617, 2.649667750, 2.802566978)),
        ({"loss": "sigmoid,nll"}, (LN2 + 2, 0.5130152524 + 2, 1.1711006659 + 1.5)),
        ({"loss": "sigmoid,nll_sum:0.5"}, (LN2 + 5, 0.5130152524 + 5, 1.1711006659 + 15)),
        ({"f_divergence": "forward_kl"}, (0.693147181, 0.394838441, 14.836337564)),
        ({"f_divergence": "js"}, (0.693147181, 0.598138869, 0.971472683)),
        ({"f_divergence": "alpha"}, (0.693147181, 0.485478259, 2.479387401)),
        ({"loss": "odpo"}, (0.693147181, 0.513015252, 1.171100666)),
    ],
)
def test_known_vector_of_a_mix_a_divergence_and_other_settings(settings: dict[str, Any], expected: tuple[float, ...]) -> None:
    losses, metrics = DPO(**settings)(SCORES)
    assert losses.tolist() == pytest.approx(expected, rel=1e-8)
    names = settings.get("loss", "").split(",")
    if len(names) > 1:
        parts = [(float(part.partition(":")[2] or 1), metrics[f"loss_{part.partition(':')[0]}"]) for part in names]
        assert sum(weight * part for weight, part in parts).tolist() == pytest.approx(expected, rel=1e-8)


STEP_ZERO = {  # loss, and gradients with respect to the log-probs of chosen and rejected, at beta 0.1
    "sigmoid": (LN2, -0.05, 0.05),
    "hinge": (1, -0.1, 0.1),
    "ipo_sum": (25, -10, 10),
    "sppo_hard": (50, -10, 10),
    "apo_zero": (1, -0.025, 0.025),
    "apo_down": (1, 0, 0.025),
    "nca": (2 * LN2, -0.025, 0.025),
    "bco": (2 * LN2, -0.05, 0.05),
    "cdpo": (LN2, -0.04, 0.04),
    "robust": (LN2, -0.0625, 0.0625),
}


@pytest.mark.parametrize("name", STEP_ZERO)
def test_loss_and_gradients_at_step_zero(name: str) -> None:
    values = vector(-7, -9).requires_grad_()
    scores = Scores(values, vector(3, 4), torch.zeros(2, dtype=torch.int64), reference=values.detach())
    losses, metrics = DPO(loss=name, beta=0.1)(scores)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert (losses.item(), *gradient.tolist()) == pytest.approx(STEP_ZERO[name], abs=1e-12)
    assert metrics["reward_margin"].tolist() == metrics["chosen_fell_rate"].tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in TERMS if "beta" in TERMS[name].defaults])
def test_far_from_the_reference_losses_and_gradients_are_finite(name: str, dtype: torch.dtype) -> None:
    far = torch.tensor([-1e4, -1.0, -1.0, -1e4, -1e4, -1e4, -2e-4, -1e-4], dtype=dtype)
    for values, reference in ((far, far.flip(0)), (far.flip(0), far), (far, 0 * far), (0 * far - 1, far)):
        policy = values.clone().requires_grad_()
        group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        margin = torch.tensor([1e4, 1e-4, 1.0, 0.0], dtype=dtype)
        losses, _ = DPO(loss=name)(Scores(policy, torch.full_like(far, 3), group, reference, {"margin": margin}, ZERO_STATE))
        (gradient,) = torch.autograd.grad(losses.sum(), policy)
        assert losses.isfinite().all() and gradient.isfinite().all(), (losses, gradient)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_a_divergence_is_finite_far_from_the_reference(divergence: Any) -> None:
    policy = vector(-1e4, -1.0, -1.0, -1e4).requires_grad_()
    scores = Scores(policy, vector(3, 3, 3, 3), torch.tensor([0, 0, 1, 1]), reference=vector(-1.0, -1e4, -1e4, -1.0))
    losses, _ = DPO(f_divergence=divergence)(scores)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert losses.isfinite().all() and gradient.isfinite().all()


def test_bco_measures_rewards_from_their_running_mean() -> None:
    """Rewards of the three pairs at beta 0.1: 0, 0; 0.2, -0.2; -0.5, 0.3. The mean counts this step's, and earlier steps'."""
    objective = DPO(loss="bco", beta=0.1, shift="running")
    assert objective.coupled and not DPO(loss="bco").coupled and objective.initial_state == {"bco_mean": 0, "bco_count": 0}
    for state, delta in (({"bco_mean": 0.0, "bco_count": 0.0}, -0.2 / 6), ({"bco_mean": 1.0, "bco_count": 4.0}, 3.8 / 10)):
        scores = dataclasses.replace(SCORES, state=state)
        losses, _ = objective(scores)
        for loss, chosen, rejected in zip(losses.tolist(), (0, 0.2, -0.5), (0, -0.2, 0.3), strict=True):
            expected = math.log1p(math.exp(delta - chosen)) + math.log1p(math.exp(rejected - delta))
            assert loss == pytest.approx(expected, rel=1e-12)
        assert objective.next_state(scores) == pytest.approx({"bco_mean": delta, "bco_count": state["bco_count"] + 6})


def test_beta_dpo_remembers_the_mean_margin() -> None:
    objective = DPO(loss="beta_dpo")
    assert objective.coupled and objective.initial_state == {"margin_mean": 0}
    assert objective.next_state(SCORES) == pytest.approx({"margin_mean": 0.9 * 0.2 + 0.1 * -0.4 / 3})


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_sorting_gives_each_pair_its_own_rank(name: str) -> None:
    """In any order of the batch a pair has the same loss."""
    order = torch.tensor([2, 0, 1])
    at = (2 * order[:, None] + torch.arange(2)).flatten()
    moved = dataclasses.replace(SCORES, values=VALUES[at], lengths=SCORES.lengths[at], reference=SCORES.reference[at])
    assert torch.equal(DPO(loss=name)(moved)[0], DPO(loss=name)(SCORES)[0][order])


def test_fixed_points() -> None:
    """Smoothed labels rest at beta h = ln((1 - e) / e), IPO at h = 1 / (2 beta)."""
    for name, h, expected in (("cdpo", math.log(9) / 0.1, 0.325083), ("ipo_sum", 5.0, 0.0)):
        values = vector(h, 0).requires_grad_()
        losses, _ = DPO(loss=name)(Scores(values, vector(1, 1), torch.zeros(2, dtype=torch.int64), reference=vector(0, 0)))
        (gradient,) = torch.autograd.grad(losses.sum(), values)
        assert losses.item() == pytest.approx(expected, abs=1e-6) and gradient.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_rewards_of_a_loss_per_token_are_per_token() -> None:
    _, metrics = DPO(loss="sigmoid_norm", beta=2.0)(SCORES)
    assert metrics["reward_chosen"].tolist() == [0, 2.0 * 2 / 5, 2.0 * -5 / 20]
    assert metrics["chosen_fell_rate"].tolist() == [0, 0, 1]


def test_swapping_the_completions_flips_every_margin() -> None:
    swapped = Scores(
        values=VALUES.view(-1, 2).flip(1).flatten(),
        lengths=SCORES.lengths.view(-1, 2).flip(1).flatten(),
        group=SCORES.group,
        reference=None if SCORES.reference is None else SCORES.reference.view(-1, 2).flip(1).flatten(),
        columns=SCORES.columns,
        state=SCORES.state,
    )
    for name, term in TERMS.items():
        if "beta" in term.defaults:
            objective = DPO(loss=name)
            (_, metrics), (_, other) = objective(SCORES), objective(swapped)
            assert torch.equal(metrics["reward_margin"], -other["reward_margin"]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "ipo"}, "ipo_mean takes log-probs per token, as TRL does, ipo_sum summed ones"),
        ({"loss": "sigmiod"}, "did you mean sigmoid"),
        ({"loss": "zzz"}, "is not known: use sigmoid, "),
        ({"loss": ""}, "is not known"),
        ({"loss": "sigmoid,sigmoid:2"}, "names sigmoid twice"),
        ({"loss": "sigmoid:0"}, "a weight must be a finite number above 0"),
        ({"loss": "sigmoid:x"}, "a weight must be a finite number above 0"),
        ({"loss": "nll"}, "loss nll prefers nothing"),
        ({"loss": "sigmoid,bco"}, "beta must be given for loss sigmoid,bco: it is usually 0.1 for sigmoid, 0.01 for bco"),
        ({"loss": "cdpo,exo"}, "label_smoothing must be given"),
        ({"tau": 0.1}, "tau has no effect on loss sigmoid; it is for discopop"),
        ({"label_smoothing": 0.1}, "label_smoothing has no effect on loss sigmoid; it is for cdpo, robust, exo"),
        ({"loss": "robust", "label_smoothing": 0.5}, "label_smoothing must be above 0 and below 0.5, got 0.5"),
        ({"loss": "exo", "label_smoothing": 0.0}, "label_smoothing must be above 0"),
        ({"loss": "dpop", "penalty": -1.0}, "penalty must be at least 0"),
        ({"loss": "apo_zero", "f_divergence": "js"}, "needs a loss of a difference of log-ratios, which apo_zero is not"),
        ({"f_alpha": 0.5}, "f_alpha has no effect on loss sigmoid; it is for f_divergence alpha"),
        ({"f_divergence": "alpha", "f_alpha": 1.0}, "f_alpha must be a finite number other than 1"),
        ({"ld_alpha": 1.5}, "ld_alpha must be at least 0 and at most 1, got 1.5"),
        ({"beta": math.inf}, "beta must be a finite number above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        DPO(**settings)


def test_a_term_has_its_authors_defaults_and_says_what_it_reads() -> None:
    assert (DPO().beta, DPO(loss="sigmoid_norm").beta, DPO(loss="sigmoid_norm,nll").beta) == (0.1, 5.0, 5.0)
    assert DPO(loss="exo").label_smoothing == 1e-3 and DPO().label_smoothing is None
    assert DPO(loss="odpo,nll:0.1").requires == ("margin",) and DPO().requires == ()
    assert DPO(loss="sigmoid,nll").beta == DPO(loss="sigmoid,nll", beta=0.1).beta
    assert DPO(f_divergence="alpha").f_alpha == 0.5


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 0.644396660), (0.5, 0.598138869), (1.0, 0.554355244)])
def test_tokens_beyond_the_shorter_completion_count_alpha(alpha: float, expected: float) -> None:
    """Log-probs of each token: policy (-1 -2 -3), (-1 -1 -1 -2 -2), reference (-1.5 -2 -3.5), (-.5 -1 -1.5 -1 -1)."""
    objective = DPO(ld_alpha=alpha)
    weights = objective.token_weights([3, 5])
    assert [w.tolist() for w in weights] == [[1, 1, 1], [1, 1, 1, alpha, alpha]]
    assert bool(objective.weighs_tokens) == (alpha < 1) and not DPO().weighs_tokens
    assert DPO(ld_alpha=0.25).weighs_tokens != DPO(ld_alpha=0.5).weighs_tokens
    policy = ([-1, -2, -3], [-1, -1, -1, -2, -2])
    reference = ([-1.5, -2, -3.5], [-0.5, -1, -1.5, -1, -1])
    values, references = (
        vector(*(float(w @ logps) for w, logps in zip(weights, side, strict=True))) for side in (policy, reference)
    )
    losses, _ = objective(Scores(values, vector(3, 5), torch.zeros(2, dtype=torch.int64), references))
    assert losses.item() == pytest.approx(expected, rel=1e-8)


def test_every_term_is_explained() -> None:
    for name, term in TERMS.items():
        text = DPO(loss=name if "beta" in term.defaults else f"sigmoid,{name}:0.5").explain()
        assert term.formula in text and term.source in text, name
