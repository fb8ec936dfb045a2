"""Losses of preference pairs, by name: what `--dpo-loss` mixes.

A term maps a pair's log-ratios to a loss. Write u and v for the log-ratios of chosen and rejected, policy over reference, in
nats; h = u - v; n_c and n_r for the completions' tokens; s for the logistic function. Invariants:
- A term is a function of one pair, unless it is coupled: then of all pairs of the global batch, which it is given at once.
- It is finite, with finite gradients, for |u|, |v| up to 1e4.
- What it reads of the hyper-parameters, its record says, with the value that it has where none is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FAR = 80.0  # exponents are kept within this: exp(80) is 5.5e34


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some pairs, each tensor [num_pairs]: log-ratios u and v, the policy's summed log-probabilities, completion tokens, the
    row's margin where the data have one; and what coupled terms remember of earlier steps."""

    u: Tensor
    v: Tensor
    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    margin: Tensor | None = None
    state: Mapping[str, float] = field(default_factory=dict)

    def z(self, beta: float) -> Tensor:
        """beta h, as the difference of the two rewards."""
        return beta * self.u - beta * self.v

    @property
    def mean_h(self) -> Tensor:
        """u / n_c - v / n_r: log-ratios per token."""
        return self.u / self.chosen_tokens - self.v / self.rejected_tokens


@dataclass(frozen=True, slots=True)
class Term:
    """loss(pairs, settings) -> [num_pairs]; defaults: the hyper-parameters that it reads, with their values; reads: columns.

    difference: it takes log-ratios only through h, so that f'(ratio) may take their place. mean: its rewards are per token.
    coupled(settings): whether it must see the whole global batch. remembers: names of what it keeps from step to step, 0 at
    first, and next_state(pairs, settings): their values after a step.
    """

    loss: Callable[[Pairs, Any], Tensor]
    formula: str
    source: str
    defaults: Mapping[str, float | str] = field(default_factory=lambda: {"beta": 0.1})
    reads: tuple[str, ...] = ()
    difference: bool = False
    mean: bool = False
    coupled: Callable[[Any], bool] = lambda settings: False
    remembers: tuple[str, ...] = ()
    next_state: Callable[[Pairs, Any], dict[str, float]] | None = None


def _logsigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _sigmoid(pairs: Pairs, p: Any) -> Tensor:
    return -_logsigmoid(pairs.z(p.beta))


def _sigmoid_norm(pairs: Pairs, p: Any) -> Tensor:
    return -_logsigmoid(p.beta * pairs.mean_h)


def _cdpo(pairs: Pairs, p: Any) -> Tensor:
    z, e = pairs.z(p.beta), p.label_smoothing
    return -(1 - e) * _logsigmoid(z) - e * _logsigmoid(-z)


def _robust(pairs: Pairs, p: Any) -> Tensor:
    z, e = pairs.z(p.beta), p.label_smoothing
    return (-(1 - e) * _logsigmoid(z) + e * _logsigmoid(-z)) / (1 - 2 * e)


def _ipo_sum(pairs: Pairs, p: Any) -> Tensor:
    return (pairs.u - pairs.v - 1 / (2 * p.beta)) ** 2


def _ipo_mean(pairs: Pairs, p: Any) -> Tensor:
    return (pairs.mean_h - 1 / (2 * p.beta)) ** 2


def _hinge(pairs: Pairs, p: Any) -> Tensor:
    return (1 - pairs.z(p.beta)).clamp(min=0)


def _apo_zero(pairs: Pairs, p: Any) -> Tensor:
    return 1 - (p.beta * pairs.u).sigmoid() + (p.beta * pairs.v).sigmoid()


def _apo_down(pairs: Pairs, p: Any) -> Tensor:
    return (p.beta * pairs.u).sigmoid() + 1 - pairs.z(p.beta).sigmoid()


def _exo(pairs: Pairs, p: Any) -> Tensor:
    z, e = pairs.z(p.beta), p.label_smoothing
    return z.sigmoid() * (_logsigmoid(z) - math.log1p(-e)) + (-z).sigmoid() * (_logsigmoid(-z) - math.log(e))


def _nca(pairs: Pairs, p: Any) -> Tensor:
    u, v = p.beta * pairs.u, p.beta * pairs.v
    return -_logsigmoid(u) - 0.5 * _logsigmoid(-u) - 0.5 * _logsigmoid(-v)


def _bco(pairs: Pairs, p: Any) -> Tensor:
    shift = _mean_reward(pairs, p)["bco_mean"] if p.shift == "running" else 0.0
    return -_logsigmoid(p.beta * pairs.u - shift) - _logsigmoid(shift - p.beta * pairs.v)


def _mean_reward(pairs: Pairs, p: Any) -> dict[str, float]:
    """The mean of all rewards up to this step, this one's included, and of how many it is."""
    rewards = (p.beta * (pairs.u + pairs.v)).detach()
    count = pairs.state["bco_count"] + 2 * len(rewards)
    total = pairs.state["bco_mean"] * pairs.state["bco_count"] + float(rewards.sum())
    return {"bco_mean": total / max(count, 1), "bco_count": count}


def _aot(pairs: Pairs, p: Any) -> Tensor:
    policy, reference = pairs.chosen - pairs.rejected, (pairs.chosen - pairs.u) - (pairs.rejected - pairs.v)
    return -_logsigmoid(p.beta * (policy - _at_rank_of(policy, reference)))


def _aot_unpaired(pairs: Pairs, p: Any) -> Tensor:
    return -_logsigmoid(p.beta * (pairs.u - _at_rank_of(pairs.u, pairs.v)))


def _at_rank_of(values: Tensor, others: Tensor) -> Tensor:
    """For each of `values` [n] the one of `others` [n] that has its rank; equal values in their order."""
    order = values.detach().argsort(stable=True)
    ranked = others[others.detach().argsort(stable=True)]
    return ranked[order.argsort()]


def _beta_dpo(pairs: Pairs, p: Any) -> Tensor:
    shift = float(pairs.z(p.beta).detach().mean()) - pairs.state["margin_mean"] if len(pairs.u) else 0.0
    beta = p.beta * max(1 + p.sensitivity * shift, 1e-3)
    return -_logsigmoid(pairs.z(beta))


def _mean_margin(pairs: Pairs, p: Any) -> dict[str, float]:
    now = float(pairs.z(p.beta).detach().mean())
    return {"margin_mean": p.momentum * pairs.state["margin_mean"] + (1 - p.momentum) * now}


def _sppo_hard(pairs: Pairs, p: Any) -> Tensor:
    return (pairs.u - 1 / (2 * p.beta)) ** 2 + (pairs.v + 1 / (2 * p.beta)) ** 2


def _discopop(pairs: Pairs, p: Any) -> Tensor:
    z = pairs.z(p.beta)
    mix = (z / p.tau).sigmoid()
    return (1 - mix) * -_logsigmoid(z) + mix * (-z.clamp(min=-FAR)).exp()


def _odpo(pairs: Pairs, p: Any) -> Tensor:
    assert pairs.margin is not None
    gap = pairs.margin.clamp(min=math.exp(-FAR)).log() if p.offset == "log" else pairs.margin
    return -_logsigmoid(pairs.z(p.beta) - p.offset_alpha * gap)


def _dpop(pairs: Pairs, p: Any) -> Tensor:
    return -_logsigmoid(pairs.z(p.beta) - p.beta * p.penalty * (-pairs.u).clamp(min=0))


def _rdpo(pairs: Pairs, p: Any) -> Tensor:
    return -_logsigmoid(pairs.z(p.beta) + p.length_alpha * (pairs.chosen_tokens - pairs.rejected_tokens))


def _wpo(pairs: Pairs, p: Any) -> Tensor:
    likely = (pairs.chosen / pairs.chosen_tokens + pairs.rejected / pairs.rejected_tokens).detach().exp()
    return likely * -_logsigmoid(pairs.z(p.beta))


def _nll(pairs: Pairs, p: Any) -> Tensor:
    return -pairs.chosen / pairs.chosen_tokens


def _nll_sum(pairs: Pairs, p: Any) -> Tensor:
    return -pairs.chosen


def _alpha_divergence(t: Tensor, alpha: float) -> Tensor:
    return ((alpha - 1) * t).clamp(max=FAR).expm1() / (alpha - 1)


# f'(ratio) of a log-ratio t, up to a constant that a difference cancels (Wang 2023, arXiv 2309.16240).
F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda t, alpha: t,
    "forward_kl": lambda t, alpha: -(-t).clamp(max=FAR).exp(),
    "js": lambda t, alpha: _logsigmoid(t),
    "alpha": _alpha_divergence,
}

_SMOOTHED = {"beta": 0.1, "label_smoothing": 0.1}

TERMS = {  # by name; sources by their first author and arXiv number
    "sigmoid": Term(_sigmoid, "-log s(beta h)", "Rafailov 2023 (DPO, 2305.18290), eq. 7", difference=True),
    "sigmoid_norm": Term(
        _sigmoid_norm, "-log s(beta (u/n_c - v/n_r))", "Lambert 2024 (Tulu 3, 2411.15124)", {"beta": 5.0}, mean=True
    ),
    "cdpo": Term(_cdpo, "-(1 - e) log s(beta h) - e log s(-beta h)", "Mitchell 2023 (cDPO note)", _SMOOTHED, difference=True),
    "robust": Term(
        _robust,
        "(-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2e)",
        "Chowdhury 2024 (2403.00409)",
        _SMOOTHED,
        difference=True,
    ),
    "ipo_sum": Term(_ipo_sum, "(h - 1/(2 beta))^2", "Azar 2023 (2310.12036), eq. 17, summed log-probs", difference=True),
    "ipo_mean": Term(
        _ipo_mean, "(u/n_c - v/n_r - 1/(2 beta))^2", "Azar 2023 (2310.12036), eq. 17, log-probs per token", mean=True
    ),
    "hinge": Term(_hinge, "max(0, 1 - beta h)", "Zhao 2023 (SLiC, 2305.10425), Liu 2023 (RSO, 2309.06657)", difference=True),
    "apo_zero": Term(_apo_zero, "1 - s(beta u) + s(beta v)", "D'Oosterlinck 2024 (APO, 2408.06266)"),
    "apo_down": Term(_apo_down, "s(beta u) + 1 - s(beta h)", "D'Oosterlinck 2024 (APO, 2408.06266)"),
    "exo": Term(
        _exo,
        "s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e), z = beta h",
        "Ji 2024 (EXO, 2402.00856), for pairs",
        {"beta": 0.1, "label_smoothing": 1e-3},
        difference=True,
    ),
    "nca": Term(
        _nca,
        "-log s(beta u) - (log s(-beta u) + log s(-beta v)) / 2",
        "Chen 2024 (NCA, 2402.05369), for pairs",
        {"beta": 0.01},
    ),
    "bco": Term(
        _bco,
        "-log s(beta u - delta) - log s(delta - beta v), delta 0 or the running mean of all rewards",
        "Jung 2024 (BCO, 2404.04656)",
        {"beta": 0.01, "shift": "zero"},
        coupled=lambda settings: settings.shift == "running",
        remembers=("bco_mean", "bco_count"),
        next_state=_mean_reward,
    ),
    "aot": Term(
        _aot,
        "-log s(beta (d - d')), d = log pi(chosen) - log pi(rejected) and d' the reference's at the same rank in the batch",
        "Melnyk 2024 (AOT, 2406.05882), paired",
        {"beta": 0.01},
        coupled=lambda settings: True,
    ),
    "aot_unpaired": Term(
        _aot_unpaired,
        "-log s(beta (u - v')), v' at u's rank in the batch",
        "Melnyk 2024 (AOT, 2406.05882), unpaired",
        {"beta": 0.01},
        coupled=lambda settings: True,
    ),
    "beta_dpo": Term(
        _beta_dpo,
        "-log s(b h), b = beta (1 + sensitivity (mean(beta h) - its running mean))",
        "Wu 2024 (beta-DPO, 2407.08639), batch level, without its filter of rows",
        {"beta": 0.1, "momentum": 0.9, "sensitivity": 0.6},
        coupled=lambda settings: True,
        remembers=("margin_mean",),
        next_state=_mean_margin,
    ),
    "sppo_hard": Term(
        _sppo_hard, "(u - 1/(2 beta))^2 + (v + 1/(2 beta))^2", "Wu 2024 (SPPO, 2405.00675), hard labels", {"beta": 0.001}
    ),
    "discopop": Term(
        _discopop,
        "(1 - m) (-log s(z)) + m exp(-z), z = beta h, m = s(z/tau)",
        "Lu 2024 (DiscoPOP, 2406.08414)",
        {"beta": 0.05, "tau": 0.05},
        difference=True,
    ),
    "odpo": Term(
        _odpo,
        "-log s(beta h - offset_alpha f(margin))",
        "Amini 2024 (ODPO, 2402.10571)",
        {"beta": 0.1, "offset_alpha": 1.0, "offset": "log"},
        reads=("margin",),
        difference=True,
    ),
    "dpop": Term(_dpop, "-log s(beta (h - penalty max(0, -u)))", "Pal 2024 (Smaug, 2402.13228)", {"beta": 0.1, "penalty": 5.0}),
    "rdpo": Term(
        _rdpo,
        "-log s(beta h + length_alpha (n_c - n_r))",
        "Park 2024 (R-DPO, 2403.19159)",
        {"beta": 0.1, "length_alpha": 0.01},
        difference=True,
    ),
    "wpo": Term(
        _wpo,
        "-w log s(beta h), w = exp(log pi(chosen)/n_c + log pi(rejected)/n_r) without gradient",
        "Zhou 2024 (WPO, 2406.11827), weights not aligned",
        {"beta": 0.01},
    ),
    "nll": Term(_nll, "-log pi(chosen)/n_c", "Pang 2024 (2404.19733): chosen's likelihood, a mean over its tokens", {}),
    "nll_sum": Term(_nll_sum, "-log pi(chosen)", "Liu 2024 (RPO, 2405.16436): chosen's likelihood, a sum over its tokens", {}),
}
