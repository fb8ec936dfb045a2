"""Pairwise objectives without a reference: SimPO, AlphaPO, CPO and ORPO.

Write lp for a completion's log-probability per token, log pi / n. Invariants:
- No reference pass, and no `ref_*` metric.
- Swapping the two completions flips the sign of `reward_margin`.
- The likelihood term of CPO and ORPO covers the chosen completion alone, a mean over its tokens; TRL's ORPO covers its prompt,
  too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from relax.objectives.base import ACCURACIES, LOSS, Metric, Objective, Scores, accuracies
from relax.objectives.dpo import LOGPS, REWARDS
from relax.objectives.terms import FAR

if TYPE_CHECKING:
    from torch import Tensor

NLL = Metric("loss_nll", "detail", "nats", better="lower")
BETA = {"help": "scale of the reward, above 0"}


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, at least 0, got {value}")


def _told(scores: Scores, losses: Tensor, rewards: Tensor, **details: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses [num_pairs] and metrics; rewards [num_sequences]."""
    (logps_chosen, logps_rejected), (chosen, rejected) = scores.pairs(scores.values), scores.pairs(rewards)
    return losses, {
        "loss": losses,
        **details,
        "logps_chosen": logps_chosen,
        "logps_rejected": logps_rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        **accuracies(chosen, rejected),
    }


@dataclass(frozen=True, slots=True)
class SimPO(Objective):
    """-log s(beta (lp chosen - lp rejected) - gamma), lp = log pi / n: Meng 2024 (SimPO, 2405.14734), eq. 6.

    gamma is the margin itself; the paper's gamma / beta ratio is gamma / beta here, and no likelihood term is added.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, *LOGPS, *REWARDS, *ACCURACIES)
    beta: float = field(default=2.0, metadata={**BETA, "help": BETA["help"] + ": 2 to 10"})
    gamma: float = field(default=1.0, metadata={"help": "margin of the reward, at least 0: 0.3 to 0.55 times beta"})

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _not_negative(gamma=self.gamma)

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses, [num_pairs]; rewards are beta lp."""
        from torch.nn.functional import logsigmoid

        rewards = self.beta * (scores.values / scores.lengths)
        chosen, rejected = scores.pairs(rewards)
        return _told(scores, -logsigmoid(chosen - rejected - self.gamma), rewards)


@dataclass(frozen=True, slots=True)
class AlphaPO(Objective):
    """-log s(r chosen - r rejected - gamma), r = beta (1 - exp(-alpha lp)) / alpha: Gupta 2025 (AlphaPO, 2501.03884)."""

    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, *LOGPS, *REWARDS, *ACCURACIES)
    beta: float = field(default=2.0, metadata=BETA)
    gamma: float = field(default=1.0, metadata={"help": "margin of the reward, at least 0"})
    alpha: float = field(default=0.25, metadata={"help": "shape of the reward, not 0: at 0 it would be SimPO's"})

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _not_negative(gamma=self.gamma)
        if not math.isfinite(self.alpha) or self.alpha == 0:
            raise ValueError(f"alpha must be a finite number other than 0, got {self.alpha}: 0 is --loss-type simpo")

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses, [num_pairs]."""
        from torch.nn.functional import logsigmoid

        powers = (-self.alpha * (scores.values / scores.lengths)).clamp(max=FAR)
        rewards = -self.beta * powers.expm1() / self.alpha
        chosen, rejected = scores.pairs(rewards)
        return _told(scores, -logsigmoid(chosen - rejected - self.gamma), rewards)


@dataclass(frozen=True, slots=True)
class CPO(Objective):
    """-log s(beta (log pi chosen - log pi rejected)) - nll_weight log pi(chosen)/n: Xu 2024 (CPO, 2401.08417)."""

    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, NLL, *LOGPS, *REWARDS, *ACCURACIES)
    beta: float = field(default=0.1, metadata=BETA)
    nll_weight: float = field(default=1.0, metadata={"help": "weight of chosen's negative log-likelihood, at least 0"})

    def __post_init__(self) -> None:
        _positive(beta=self.beta)
        _not_negative(nll_weight=self.nll_weight)

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses, [num_pairs]; rewards are beta log pi."""
        from torch.nn.functional import logsigmoid

        rewards = self.beta * scores.values
        (chosen, rejected), (likelihood, _) = scores.pairs(rewards), scores.pairs(scores.values / scores.lengths)
        return _told(scores, -logsigmoid(chosen - rejected) - self.nll_weight * likelihood, rewards, loss_nll=-likelihood)


@dataclass(frozen=True, slots=True)
class ORPO(Objective):
    """-lp chosen - weight log s(log odds chosen - log odds rejected), log odds = lp - log(1 - exp lp), lp = log pi / n.

    Hong 2024 (ORPO, 2403.07691), eq. 6 and 7.
    """

    default_lr: ClassVar[float] = 8e-6
    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, NLL, *LOGPS, *REWARDS, *ACCURACIES)
    weight: float = field(default=0.1, metadata={"help": "weight of the odds ratio, lambda, above 0"})

    def __post_init__(self) -> None:
        _positive(weight=self.weight)

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses, [num_pairs]; rewards are weight lp."""
        from torch.nn.functional import logsigmoid

        mean = scores.values / scores.lengths
        (chosen, rejected), (likelihood, _) = scores.pairs(mean - _log1mexp(mean)), scores.pairs(mean)
        losses = -likelihood - self.weight * logsigmoid(chosen - rejected)
        return _told(scores, losses, self.weight * mean, loss_nll=-likelihood)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x below 0, exact at both ends: where exp(x) is near 1 by expm1, else by log1p. 0 counts as -1e-7."""
    import torch

    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    # Each branch sees numbers of its own side alone, so that neither gives the other's gradient NaN.
    by_expm1 = (-torch.where(near, x, -1.0).expm1()).log()
    by_log1p = (-torch.where(near, -1.0, x).exp()).log1p()
    return torch.where(near, by_expm1, by_log1p)
