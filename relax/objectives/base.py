"""What an objective is: a pure function of one score per sequence, and a declaration of what it needs and what it tells.

The unit is a prompt with its completions, a group: a preference pair is a group of two. Invariants:
- An objective sees scores, never tokens, packs or ranks: it returns a loss per group, and the engine sums over the groups
  of the global batch and divides once by their number.
- It sees groups in any portions, unless it is `coupled`: then all groups of the global batch at once, so that no statistic
  depends on how they are packed.
- Its metrics are one value per group, declared by `metrics` and in its order, the loss first; what a metric is for, its role
  says, and nothing guesses it from a name.
- The command line reads the objectives' fields: these modules load torch when a loss is computed, so that `--help` answers
  at once.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

Head = Literal["lm", "scalar"]
# loss: what is minimised; score: of one completion; reference: the frozen reference's; margin: of the better completion over
# the worse one; strict, ties, accuracy: ranked right, equal, the first plus half the second; detail: anything else.
Role = Literal["loss", "score", "reference", "margin", "strict", "ties", "accuracy", "detail"]
# pair: two completions, the first better; tie: two, equally good; ranking: more, best first; single: one.
GroupKind = Literal["pair", "tie", "ranking", "single"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that an objective gives for each group, and logs as a mean over groups.

    unit: "nats", or "" for a share or a number without one. better: the direction that training should move it in.
    """

    name: str
    role: Role
    unit: str = ""
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of the sequences of some groups, a group's sequences side by side, best first.

    values [num_sequences]: summed log-probabilities of the completion in nats (head "lm") or rewards (head "scalar").
    lengths [num_sequences]: completion tokens. group [num_sequences]: which group a sequence belongs to, counted from 0.
    reference [num_sequences]: the frozen reference's summed log-probabilities, where the objective needs them.
    columns {name: [num_groups]}: what the objective `reads` of the rows; a name is missing where no row of the data has it.
    state: what the objective remembers of earlier steps. ranks [num_sequences]: from 1, the best of its group; None where no
    two completions of any group are equally good. All tensors but `group` in fp64.
    """

    values: Tensor
    lengths: Tensor
    group: Tensor
    reference: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    ranks: Tensor | None = None

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [num_sequences] of groups of two as (chosen, rejected), each [num_groups]."""
        chosen, rejected = values.view(-1, 2).unbind(1)
        return chosen, rejected


class Objective(ABC):
    """What a run minimises. A subclass is a frozen dataclass whose fields are its hyper-parameters: each becomes a flag.

    A field has a default, and carries `metadata={"help": ...}`. `__post_init__` raises ValueError for a bad value, naming field
    and rule. A subclass sets what differs from here as a class attribute, or as a property of its hyper-parameters.
    """

    __slots__ = ()
    takes: ClassVar[tuple[GroupKind, ...]] = ("pair",)  # the groups that it can be given; a run with others is refused
    head: ClassVar[Head] = "lm"  # a sequence's score: its completion's summed log-probability, or a "scalar" head's reward
    default_lr: ClassVar[float] = 5e-7  # what --lr is where it is not given

    @property
    def needs_reference(self) -> bool:
        """Whether `Scores.reference` must be given."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of a row that it takes where they are, by the names of `relax.data.columns`."""
        return ()

    @property
    def requires(self) -> tuple[str, ...]:
        """Those of them that every row must have, or every one of a single completion where the column is of those alone."""
        return ()

    @property
    def weighs_tokens(self) -> str:
        """What tells its `token_weights` from another objective's: a part of the reference table's identity; "" for none."""
        return ""

    def token_weights(self, lengths: Sequence[int]) -> list[ndarray]:
        """What each token's log-probability counts in its completion's score, [tokens] for each of a group's completions, by
        their lengths. Called where it `weighs_tokens`, for the policy and its reference alike."""
        raise ValueError("this objective weighs no tokens")

    @property
    def coupled(self) -> bool:
        """Whether a group's loss depends on the others of its global batch: it is then called once with all of them."""
        return False

    @property
    def initial_state(self) -> Mapping[str, float]:
        """What it remembers before the first step."""
        return {}

    def next_state(self, scores: Scores) -> Mapping[str, float]:
        """What it remembers after a step with these scores, of its whole global batch. Called where it is `coupled`."""
        return scores.state

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """What it tells of each group, the loss first."""

    @abstractmethod
    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses [num_groups] to differentiate, and `metrics` {name: [num_groups]}."""

    def explain(self) -> str:
        """What it is, in a few lines: formula, source, units."""
        return inspect.cleandoc(type(self).__doc__ or "")


LOSS = Metric("loss", "loss", better="lower")
ACCURACIES = (
    Metric("strict_accuracy", "strict", better="higher"),
    Metric("tie_rate", "ties"),
    Metric("tie_aware_accuracy", "accuracy", better="higher"),
)


def accuracies(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """`ACCURACIES` of pairs: chosen above rejected, equal, the first plus half of the second; 0, 1/2 or 1, each [num_pairs]."""
    strict = (chosen > rejected).to(chosen.dtype)
    tie = (chosen == rejected).to(chosen.dtype)
    return {metric.name: value for metric, value in zip(ACCURACIES, (strict, tie, strict + tie / 2), strict=True)}


def with_role(metrics: Iterable[Metric], *roles: Role) -> tuple[Metric, ...]:
    """Those of the metrics that play one of the roles, in their order."""
    return tuple(metric for metric in metrics if metric.role in roles)
