"""The record of a run's operators: what the model calls where more than one implementation exists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from relax.backend.model.layout import PackedLayout


class Choice(NamedTuple):
    """What was chosen, by a name that tells implementations of other bits apart, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operator, for tensors of one device and one dtype.

    With gradients:

    rms_norm(x [..., width], weight [width], eps) -> w x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019)
    swiglu(x [..., 2 * width], gate before up) -> silu(gate) * up [..., width] (Shazeer 2020)
    rotate(x [rows, 1, heads, head_dim], cos, sin [rows, 1, 1, head_dim / 2]) -> rotary embedding (Su 2021) of x: the first half
        of a head's dimensions with the second, as in Hugging Face's models; none for the angles
    attention(query [rows, heads, head_dim], key, value [keys, key heads, head_dim], layout, scale) -> like query
    grouped_linear(rows [n, in] sorted by group, weights [groups, out, in], counts [groups]) -> rows times their group's
        transposed weight [n, out]

    Without:

    widened(x) -> x in the dtype in which matrices of its dtype are multiplied, itself where that is its own
    linear(rows [m, k], weight [n, k]) -> rows times the transposed weight [m, n]
    add_weight_gradient(total [n, k], grad [m, n], rows [m, k]): the gradient of linear's weight is added to total, fp32 or fp64
    logits_sum(z [rows, vocabulary], top [rows], total [rows]): each row's largest logit goes into top, and the sum of
        exp(logit - largest) into total
    logits_gradient(z [rows, vocabulary], logsumexp [rows], grad, column, at_target, all [rows, 1]): logits become their
        gradient in place, -grad softmax, and at_target more in the target's column

    choices: by the kind of work, for the log and for what says which numbers are comparable.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, PackedLayout, float], Tensor]
    grouped_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    widened: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    add_weight_gradient: Callable[[Tensor, Tensor, Tensor], None]
    logits_sum: Callable[[Tensor, Tensor, Tensor], None]
    logits_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    choices: dict[str, Choice]
