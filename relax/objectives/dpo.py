"""Direct preference optimisation: chosen completions become likelier than rejected ones, relative to a frozen reference.

Rafailov et al. 2023, "Direct Preference Optimization", and its family: `loss` is a weighted mix of the terms of `terms.py`.
Invariants:
- Under the sigmoid loss a policy equal to its reference gives ln 2 for every pair, and gradients of -beta/2 (chosen) and
  +beta/2 (rejected).
- Swapping the two completions flips the sign of `reward_margin`.
- Without a reference, log-ratios are the policy's own log-probabilities, and no `ref_*` metric exists.
- A hyper-parameter that no term of the mix reads is refused; one that is not given has its term's own default.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from relax.objectives.base import ACCURACIES, LOSS, Metric, Objective, Scores, accuracies
from relax.objectives.terms import F_DIVERGENCES, TERMS, Pairs, Term

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

LOGPS = (Metric("logps_chosen", "score", "nats"), Metric("logps_rejected", "score", "nats"))
REFERENCE = (Metric("ref_logps_chosen", "reference", "nats"), Metric("ref_logps_rejected", "reference", "nats"))
REWARDS = (
    Metric("reward_chosen", "score", "nats"),
    Metric("reward_rejected", "score", "nats"),
    Metric("reward_margin", "margin", "nats", better="higher"),
)
FELL = Metric("chosen_fell_rate", "detail", better="lower")  # the share of pairs whose chosen log-prob is below its reference's


@dataclass(frozen=True, slots=True)
class DPO(Objective):
    """A weighted mix of pairwise losses on summed log-probabilities, relative to a frozen reference."""

    loss: str = field(
        default="sigmoid",
        metadata={
            "help": f"NAME[:WEIGHT],... of {', '.join(TERMS)}: their weighted sum, such as sigmoid:0.8,bco:0.2,nll:1; "
            "--explain-loss tells what it is"
        },
    )
    beta: float | None = field(
        default=None,
        metadata={
            "help": "strength of the pull to the reference, above 0: the reward is beta x log-ratio in nats (default: 0.1, but "
            "5 for sigmoid_norm, 0.05 for discopop, 0.01 for nca, bco and wpo, 0.001 for sppo_hard, as their authors)"
        },
    )
    label_smoothing: float | None = field(
        default=None,
        metadata={"help": "share of labels taken to be wrong, above 0 and below 0.5 (default: cdpo, robust 0.1; exo 0.001)"},
    )
    tau: float | None = field(default=None, metadata={"help": "temperature of discopop's mix (default: 0.05)"})
    offset_alpha: float | None = field(default=None, metadata={"help": "odpo: weight of the row's margin (default: 1)"})
    offset: Literal["log", "identity"] | None = field(
        default=None, metadata={"help": "odpo: what the row's margin, a gap of scores above 0, goes through (default: log)"}
    )
    penalty: float | None = field(default=None, metadata={"help": "dpop: weight of a chosen log-prob's fall (default: 5)"})
    length_alpha: float | None = field(default=None, metadata={"help": "rdpo: weight of a token of length (default: 0.01)"})
    shift: Literal["zero", "running"] | None = field(
        default=None,
        metadata={"help": "bco: what rewards are measured from: nothing, or their running mean over all steps (default: zero)"},
    )
    momentum: float | None = field(
        default=None, metadata={"help": "beta_dpo: share of the mean margin that is kept each step (default: 0.9)"}
    )
    sensitivity: float | None = field(
        default=None, metadata={"help": "beta_dpo: how far a batch's margin moves its beta (default: 0.6)"}
    )
    ld_alpha: float | None = field(
        default=None,
        metadata={
            "help": "weight of a completion's tokens beyond the length of the shorter one of its pair, 0 to 1, in policy and "
            "reference (LD-DPO, Liu 2024, arXiv 2409.06411; default: 1, as the others)"
        },
    )
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = field(
        default="reverse_kl",
        metadata={"help": "divergence from the reference, for losses that take a difference of log-ratios"},
    )
    f_alpha: float | None = field(default=None, metadata={"help": "alpha of --dpo-f-divergence alpha, not 1 (default: 0.5)"})
    reference_free: bool = field(
        default=False,
        metadata={"help": "train without a reference: rewards are beta x the policy's log-probabilities"},
    )

    def __post_init__(self) -> None:
        mix = list(_parse(self.loss))
        if not any("beta" in term.defaults for _, term, _ in mix):
            raise ValueError(f"loss {self.loss} prefers nothing: add a pairwise loss to it, such as sigmoid")
        self._settle(mix)
        for name, rule, holds in (
            ("beta", "a finite number above 0", lambda x: math.isfinite(x) and x > 0),
            ("label_smoothing", "above 0 and below 0.5", lambda x: 0 < x < 0.5),
            ("tau", "above 0", lambda x: x > 0),
            ("offset_alpha", "at least 0", lambda x: x >= 0),
            ("penalty", "at least 0", lambda x: x >= 0),
            ("ld_alpha", "at least 0 and at most 1", lambda x: 0 <= x <= 1),
            ("momentum", "at least 0 and below 1", lambda x: 0 <= x < 1),
            ("sensitivity", "at least 0", lambda x: x >= 0),
            ("f_alpha", "a finite number other than 1", lambda x: math.isfinite(x) and x != 1),
        ):
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} must be {rule}, got {value}")
        if self.f_divergence != "reverse_kl":
            other = [name for name, term, _ in mix if "beta" in term.defaults and not term.difference]
            if other:
                raise ValueError(
                    f"f_divergence {self.f_divergence} needs a loss of a difference of log-ratios, which {other[0]} is not"
                )

    def _settle(self, mix: list[tuple[str, Term, float]]) -> None:
        """Give hyper-parameters that the mix reads its defaults, and refuse those that it does not."""
        defaults: dict[str, dict[str, float | str]] = {}
        for name, term, _ in mix:
            for key, value in term.defaults.items():
                defaults.setdefault(key, {})[name] = value
        if self.f_divergence == "alpha":
            defaults["f_alpha"] = {"alpha": 0.5}
        for hyper in fields(self):
            if hyper.default is not None or hyper.name == "ld_alpha":
                continue
            given, known = getattr(self, hyper.name), defaults.get(hyper.name)
            if known is None and given is not None:
                readers = [name for name, term in TERMS.items() if hyper.name in term.defaults] or ["f_divergence alpha"]
                raise ValueError(f"{hyper.name} has no effect on loss {self.loss}; it is for {', '.join(readers)}")
            if known is not None and given is None:
                if len(set(known.values())) > 1:
                    usual = ", ".join(f"{value} for {name}" for name, value in known.items())
                    raise ValueError(f"{hyper.name} must be given for loss {self.loss}: it is usually {usual}")
                object.__setattr__(self, hyper.name, next(iter(known.values())))

    @property
    def reads(self) -> tuple[str, ...]:
        """See `Objective.reads`."""
        return tuple(dict.fromkeys(column for _, term, _ in _parse(self.loss) for column in term.reads))

    @property
    def requires(self) -> tuple[str, ...]:
        """See `Objective.requires`."""
        return self.reads

    @property
    def needs_reference(self) -> bool:
        """True unless `reference_free`."""
        return not self.reference_free

    @property
    def weighs_tokens(self) -> str:
        """See `Objective.weighs_tokens`."""
        return f"{self.ld_alpha} beyond the shorter completion" if self.ld_alpha not in (None, 1.0) else ""

    def token_weights(self, lengths: Sequence[int]) -> list[ndarray]:
        """See `Objective.token_weights`."""
        import numpy as np

        shorter, beyond = min(lengths), 1.0 if self.ld_alpha is None else self.ld_alpha
        return [np.where(np.arange(length) < shorter, 1.0, beyond) for length in lengths]

    @property
    def coupled(self) -> bool:
        """See `Objective.coupled`."""
        return any(term.coupled(self) for _, term, _ in _parse(self.loss))

    @property
    def initial_state(self) -> Mapping[str, float]:
        """See `Objective.initial_state`."""
        return {key: 0.0 for _, term, _ in _parse(self.loss) if term.coupled(self) for key in term.remembers}

    def next_state(self, scores: Scores) -> Mapping[str, float]:
        """See `Objective.next_state`."""
        pairs = self._pairs(scores)
        return {
            key: value
            for _, term, _ in _parse(self.loss)
            if term.coupled(self) and term.next_state
            for key, value in term.next_state(pairs, self).items()
        }

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """See `Objective.metrics`."""
        mix = list(_parse(self.loss))
        parts = [Metric(f"loss_{name}", "detail", better="lower") for name, _, _ in mix] if len(mix) > 1 else []
        reference = (*REFERENCE, FELL) if self.needs_reference else ()
        return (LOSS, *parts, *LOGPS, *reference, *REWARDS, *ACCURACIES)

    def __call__(self, scores: Scores) -> tuple[Tensor, dict[str, Tensor]]:
        """The mix's losses, [num_pairs]."""
        pairs, mix = self._pairs(scores), list(_parse(self.loss))
        parts = {name: term.loss(pairs, self) for name, term, _ in mix}
        weighted = [parts[name] if weight == 1 else weight * parts[name] for name, _, weight in mix]
        losses = sum(weighted[1:], weighted[0])
        found = {"loss": losses, **{f"loss_{name}": part for name, part in parts.items()}}
        found |= {"logps_chosen": pairs.chosen, "logps_rejected": pairs.rejected, FELL.name: (pairs.u < 0).to(losses.dtype)}
        if scores.reference is not None:
            found |= zip(("ref_logps_chosen", "ref_logps_rejected"), scores.pairs(scores.reference), strict=True)
        # Implicit rewards of equation 5, without the partition term, which cancels inside a pair.
        assert self.beta is not None
        per_token = next(term for _, term, _ in mix if "beta" in term.defaults).mean
        chosen = self.beta * (pairs.u / pairs.chosen_tokens if per_token else pairs.u)
        rejected = self.beta * (pairs.v / pairs.rejected_tokens if per_token else pairs.v)
        found |= {"reward_chosen": chosen, "reward_rejected": rejected, "reward_margin": chosen - rejected}
        found |= accuracies(chosen, rejected)
        return losses, {metric.name: found[metric.name] for metric in self.metrics}

    def _pairs(self, scores: Scores) -> Pairs:
        # The reference is subtracted side by side: near-equal log-probabilities then cancel without rounding.
        ratios = scores.values
        if self.needs_reference:
            if scores.reference is None:
                raise ValueError("DPO with a reference needs the reference's scores")
            ratios = scores.values - scores.reference
        ratios = F_DIVERGENCES[self.f_divergence](ratios, self.f_alpha or 0.0)
        return Pairs(
            *scores.pairs(ratios),
            *scores.pairs(scores.values),
            *scores.pairs(scores.lengths),
            margin=scores.columns.get("margin"),
            state=scores.state,
        )

    def explain(self) -> str:
        """Formula, source and reduction of each term, and what the loss is before the first step."""
        given = {hyper.name: getattr(self, hyper.name) for hyper in fields(self) if hyper.default is None}
        settings = ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in given.items()
            if value is not None
        )
        lines = [f"{self.loss}: {settings}"]
        for name, term, weight in _parse(self.loss):
            lines += [f"  {weight:g} x {name}: {term.formula}", f"      {term.source}"]
        if self.f_divergence != "reverse_kl":
            lines.append(f"  u and v are f'(ratio) of the {self.f_divergence} divergence (Wang 2023, arXiv 2309.16240)")
        if self.weighs_tokens:
            lines.append(f"  tokens beyond the shorter completion count {self.ld_alpha} (Liu 2024, LD-DPO, 2409.06411)")
        if self.reference_free:
            lines.append("  without a reference: u and v are the policy's summed log-probabilities")
        return "\n".join(
            [*lines, "  u, v: log-ratios of chosen and rejected, nats; n_c, n_r: their tokens; s: logistic function"]
        )


def _parse(text: str) -> Iterator[tuple[str, Term, float]]:
    """(name, term, weight) of each part of a mix. ValueError for what is none."""
    seen: set[str] = set()
    for part in text.split(","):
        name, colon, number = part.strip().partition(":")
        if name == "ipo":
            raise ValueError("loss ipo is two losses: ipo_mean takes log-probs per token, as TRL does, ipo_sum summed ones")
        if name not in TERMS:
            near = difflib.get_close_matches(name, TERMS, n=1)
            raise ValueError(
                f"loss {name!r} is not known: " + (f"did you mean {near[0]}?" if near else f"use {', '.join(TERMS)}")
            )
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"loss {part.strip()!r}: a weight must be a finite number above 0")
        if name in seen:
            raise ValueError(f"loss {text!r} names {name} twice")
        seen.add(name)
        yield name, TERMS[name], weight
