"""What `attention.py` does between its products, each a pass over memory: its record, and torch's operations for it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Passes:
    """by_group(x [rows, heads, width], groups, dtype) -> [groups, rows * heads of a group, width] in `dtype`

    from_groups(x [groups, rows * heads of a group, width], out [rows, heads, width]): x goes into out

    to_probabilities(scores, p, logsumexp, rows, scale): p = softmax(scale scores), both [groups, rows * heads of a group,
        keys], 0 at keys later than the row; the last row sees every key. The logarithm of each softmax's sum goes to logsumexp
        [all rows, heads]. The scores are used up.

    to_gradients(scores, along, p, ds, logsumexp, delta, rows, scale): from scores q k and along = g v, p = softmax(scale
        scores) and ds = scale p (along - delta), the gradient of q k, all [groups, rows * heads of a group, keys], and exactly
        0 at keys later than the row; logsumexp, delta [all rows, heads]. Scores and along are used up.

    row_products(grad, result, both [rows, heads, width], dtype) -> sums over the last dimension of grad * result, in `dtype`
    """

    by_group: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]
    from_groups: Callable[[torch.Tensor, torch.Tensor], None]
    to_probabilities: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, slice, float], None]
    to_gradients: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, slice, float], None
    ]
    row_products: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


def by_group(x: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)


def from_groups(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, groups = out.size(0), x.size(0)
    out.unflatten(1, (groups, -1)).copy_(x.unflatten(1, (rows, -1)).transpose(0, 1))


def to_probabilities(scores: torch.Tensor, p: torch.Tensor, logsumexp: torch.Tensor, rows: slice, scale: float) -> None:
    new = rows.stop - rows.start
    _later(scores.mul_(scale), new).masked_fill_(_mask(new), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    sums = scores.sub_(top).exp_().sum(-1, keepdim=True)
    torch.div(scores, sums, out=scores)
    if p.dtype != scores.dtype:
        p.copy_(scores)
    from_groups(sums.log_().add_(top), logsumexp[rows][..., None])


def to_gradients(
    scores: torch.Tensor,
    along: torch.Tensor,
    p: torch.Tensor,
    ds: torch.Tensor,
    logsumexp: torch.Tensor,
    delta: torch.Tensor,
    rows: slice,
    scale: float,
) -> None:
    groups, new = p.size(0), rows.stop - rows.start
    sums, delta = (by_group(x[rows][..., None], groups, x.dtype) for x in (logsumexp, delta))
    torch.add(-sums, scores, alpha=scale, out=scores).exp_()
    _later(scores, new).masked_fill_(_mask(new), 0)  # even where exp overflowed
    along.sub_(delta).mul_(scores).mul_(scale)
    if p.dtype != scores.dtype:
        p.copy_(scores)
        ds.copy_(along)


def row_products(grad: torch.Tensor, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (grad.to(dtype) * result).sum(-1)


def _later(p: torch.Tensor, new: int) -> torch.Tensor:
    """Of p [groups, rows * heads, keys] the last `new` keys, which are the rows' own: a view [groups, rows, heads, new]."""
    return p.unflatten(1, (new, -1))[..., p.size(2) - new :]


@functools.cache
def _mask(new: int) -> torch.Tensor:
    """Which of `new` keys are later than each of their rows, [rows, 1, new]."""
    return torch.ones(new, new, dtype=torch.bool).triu(1)[:, None]


TORCH = Passes(
    by_group=by_group,
    from_groups=from_groups,
    to_probabilities=to_probabilities,
    to_gradients=to_gradients,
    row_products=row_products,
)
