"""Direct preference optimisation: chosen answers become likelier than rejected ones, relative to a frozen reference.

Rafailov et al. 2023, "Direct Preference Optimization", equation 7. Invariants:
- A policy equal to its reference gives ln 2 for every pair, and gradients of -beta/2 (chosen) and +beta/2 (rejected).
- Swapping the two answers flips the sign of `reward_margin`.
- Without a reference, rewards are beta times the policy's own log-probabilities, and no `ref_*` metric exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from relax.losses.base import ACCURACY_NAMES, PairScores, accuracies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DPO:
    """The sigmoid loss on summed log-probabilities."""

    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    beta: float = field(
        default=0.1,
        metadata={"help": "strength of the pull to the reference, above 0: the reward is beta x log-ratio in nats"},
    )
    reference_free: bool = field(
        default=False,
        metadata={"help": "train without a reference: rewards are beta x the policy's log-probabilities"},
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ValueError(f"beta must be a finite number above 0, got {self.beta}")

    @property
    def needs_reference(self) -> bool:
        """True unless `reference_free`."""
        return not self.reference_free

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Loss.metric_names`."""
        reference = ("ref_logps_chosen", "ref_logps_rejected") if self.needs_reference else ()
        rewards = ("reward_chosen", "reward_rejected", "reward_margin")
        return ("loss", "logps_chosen", "logps_rejected", *reference, *rewards, *ACCURACY_NAMES)

    def __call__(self, scores: PairScores) -> tuple[Tensor, dict[str, Tensor]]:
        """-logsigmoid(reward_chosen - reward_rejected), `[num_pairs]`; row margins are for reward models only."""
        from torch.nn.functional import logsigmoid

        reward_chosen, reward_rejected = self._rewards(scores)
        reward_margin = reward_chosen - reward_rejected
        losses = -logsigmoid(reward_margin)
        metrics = {
            "loss": losses,
            "logps_chosen": scores.chosen,
            "logps_rejected": scores.rejected,
            "ref_logps_chosen": scores.ref_chosen,
            "ref_logps_rejected": scores.ref_rejected,
            "reward_chosen": reward_chosen,
            "reward_rejected": reward_rejected,
            "reward_margin": reward_margin,
            **accuracies(reward_chosen, reward_rejected),
        }
        named = {name: metrics[name] for name in self.metric_names}
        return losses, {name: value.detach() for name, value in named.items() if value is not None}

    def _rewards(self, scores: PairScores) -> tuple[Tensor, Tensor]:
        """Implicit rewards of equation 5, without the partition term, which cancels inside a pair."""
        if self.reference_free:
            return self.beta * scores.chosen, self.beta * scores.rejected
        if scores.ref_chosen is None or scores.ref_rejected is None:
            raise ValueError("DPO with a reference needs ref_chosen and ref_rejected")
        # Subtract the reference side by side: near-equal log-probabilities then cancel without rounding.
        return self.beta * (scores.chosen - scores.ref_chosen), self.beta * (scores.rejected - scores.ref_rejected)
