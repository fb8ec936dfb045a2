"""Direct preference optimisation: chosen completions become likelier than rejected ones, relative to a frozen reference.

Rafailov et al. 2023, "Direct Preference Optimization", equation 7. Invariants:
- A policy equal to its reference gives ln 2 for every pair, and gradients of -beta/2 (chosen) and +beta/2 (rejected).
- Swapping the two completions flips the sign of `reward_margin`.
- Without a reference, rewards are beta times the policy's own log-probabilities, and no `ref_*` metric exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from relax.objectives.base import ACCURACIES, LOSS, Head, Metric, Scores, accuracies

if TYPE_CHECKING:
    from torch import Tensor

LOGPS = (Metric("logps_chosen", "score", "nats"), Metric("logps_rejected", "score", "nats"))
REFERENCE = (Metric("ref_logps_chosen", "reference", "nats"), Metric("ref_logps_rejected", "reference", "nats"))
REWARDS = (
    Metric("reward_chosen", "score", "nats"),
    Metric("reward_rejected", "score", "nats"),
    Metric("reward_margin", "margin", "nats", better="higher"),
)


@dataclass(frozen=True, slots=True)
class DPO:
    """The sigmoid loss on summed log-probabilities."""

    head: ClassVar[Head] = "lm"
    reads: ClassVar[tuple[str, ...]] = ()

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
    def metrics(self) -> tuple[Metric, ...]:
        """See `Objective.metrics`."""
        return (LOSS, *LOGPS, *(() if self.reference_free else REFERENCE), *REWARDS, *ACCURACIES)

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """-logsigmoid(reward_chosen - reward_rejected), [num_pairs]."""
        from torch.nn.functional import logsigmoid

        metrics = dict(zip(("logps_chosen", "logps_rejected"), scores.pairs(scores.values), strict=True))
        # Implicit rewards of equation 5, without the partition term, which cancels inside a pair. The reference is subtracted
        # side by side: near-equal log-probabilities then cancel without rounding.
        ratios = scores.values
        if not self.reference_free:
            if scores.reference is None:
                raise ValueError("DPO with a reference needs the reference's scores")
            ratios = scores.values - scores.reference
            metrics |= zip(("ref_logps_chosen", "ref_logps_rejected"), scores.pairs(scores.reference), strict=True)
        chosen, rejected = scores.pairs(self.beta * ratios)
        margin = chosen - rejected
        losses = -logsigmoid(margin)
        rewards = {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": margin}
        return losses, {"loss": losses, **metrics, **rewards, **accuracies(chosen, rejected)}
