"""Reward modelling: a scalar score for each completion, the chosen one's above the rejected one's.

Bradley and Terry 1952, as in Ouyang et al. 2022 (InstructGPT), equation 1; row margins as in Touvron et al. 2023
(Llama 2), equation 2. Invariants:
- Equal scores without a margin give ln 2, and gradients of -1/2 (chosen) and +1/2 (rejected).
- Adding a constant to both scores changes nothing; swapping the two completions flips the sign of `score_margin`.
- A row's margin moves the loss only: `score_margin` and the accuracies report plain scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from relax.objectives.base import ACCURACIES, LOSS, Head, Metric, Objective, Scores, accuracies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RewardModel(Objective):
    """-log s(chosen - rejected - margin): Bradley and Terry 1952, on rewards; margins as in Llama 2 (Touvron 2023), eq. 2."""

    head: ClassVar[Head] = "scalar"
    default_lr: ClassVar[float] = 1e-5
    reads: ClassVar[tuple[str, ...]] = ("margin",)
    metrics: ClassVar[tuple[Metric, ...]] = (
        LOSS,
        Metric("score_chosen", "score"),
        Metric("score_rejected", "score"),
        Metric("score_margin", "margin", better="higher"),
        *ACCURACIES,
    )

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """-logsigmoid(chosen - rejected - margin), [num_pairs]; no margin counts as 0."""
        from torch.nn.functional import logsigmoid

        chosen, rejected = scores.pairs(scores.values)
        margin = chosen - rejected
        losses = -logsigmoid(margin - scores.columns["margin"] if "margin" in scores.columns else margin)
        rewards = {"score_chosen": chosen, "score_rejected": rejected, "score_margin": margin}
        return losses, {"loss": losses, **rewards, **accuracies(chosen, rejected)}
