"""Reward modelling: a scalar score for each answer, the chosen one's above the rejected one's.

Bradley and Terry 1952, as in Ouyang et al. 2022 (InstructGPT), equation 1; row margins as in Touvron et al. 2023
(Llama 2), equation 2. Invariants:
- Equal scores without a margin give ln 2, and gradients of -1/2 (chosen) and +1/2 (rejected).
- Adding a constant to both scores changes nothing; swapping the two answers flips the sign of `score_margin`.
- A row's margin moves the loss only: `score_margin` and the accuracies report plain scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from relax.losses.base import ACCURACY_NAMES, PairScores, accuracies

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RewardModel:
    """The pairwise logistic loss on scalar scores."""

    head: ClassVar[Literal["lm", "scalar"]] = "scalar"

    @property
    def needs_reference(self) -> bool:
        """A reward model is its own measure."""
        return False

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See `Loss.metric_names`."""
        return ("loss", "score_chosen", "score_rejected", "score_margin", *ACCURACY_NAMES)

    def __call__(self, scores: PairScores) -> tuple[Tensor, dict[str, Tensor]]:
        """-logsigmoid(chosen - rejected - margin), `[num_pairs]`; no margin counts as 0."""
        from torch.nn.functional import logsigmoid

        score_margin = scores.chosen - scores.rejected
        losses = -logsigmoid(score_margin if scores.margin is None else score_margin - scores.margin)
        metrics = {
            "loss": losses,
            "score_chosen": scores.chosen,
            "score_rejected": scores.rejected,
            "score_margin": score_margin,
            **accuracies(scores.chosen, scores.rejected),
        }
        return losses, {name: value.detach() for name, value in metrics.items()}
