"""What a loss is: a pure function of one score per sequence, and the metrics that all of them share.

Invariants:
- A loss sees pairs, never tokens, batches or ranks: it returns a value per pair, and the engine sums and divides once.
- Metrics are detached, one value per pair, named by `metric_names` and in its order, "loss" first.
- The command line reads the losses' fields: these modules load torch when a loss is computed, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of a list of pairs, each `[num_pairs]`, accumulated in fp32 or wider.

    A score is a summed log-probability in nats (head "lm") or a reward (head "scalar"). `ref_*` are the frozen
    reference's summed log-probabilities; `margin` is how far the row asks chosen to be above rejected, in score units.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    margin: Tensor | None = None


class Loss(Protocol):
    """A frozen dataclass whose fields are its hyper-parameters; the command line derives one flag from each.

    A field carries `metadata={"help": ...}`. `__post_init__` raises ValueError for a bad value, naming field and rule.
    """

    head: ClassVar[Literal["lm", "scalar"]]

    @property
    def needs_reference(self) -> bool:
        """Whether `PairScores.ref_chosen` and `ref_rejected` must be given."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the per-pair metrics, "loss" first."""
        ...

    def __call__(self, scores: PairScores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses `[num_pairs]` to differentiate, and detached metrics `{name: [num_pairs]}`."""
        ...


ACCURACY_NAMES = ("strict_accuracy", "tie_rate", "tie_aware_accuracy")


def accuracies(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Chosen above rejected, equal, and the first plus half of the second, as 0, 1/2 or 1: each `[num_pairs]`."""
    strict = (chosen > rejected).to(chosen.dtype)
    tie = (chosen == rejected).to(chosen.dtype)
    return dict(zip(ACCURACY_NAMES, (strict, tie, strict + tie / 2), strict=True))
