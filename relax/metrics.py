"""Numbers about a step: means over groups (a pair, or another prompt with its completions), and honest throughput.

Invariants: every metric is one mean over all groups of the global batch or evaluation set that have it, never a mean of means;
tokens are real ones (a shared prompt once, padding never); FLOPs are those the objective needs: the vocabulary only where a
completion token is predicted, a prompt more than once only where it is laid out so.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


def group_means(values: np.ndarray, names: Iterable[str], *, prefix: str) -> dict[str, float]:
    """Means over groups of values [num_groups, metrics], as {prefix + name: mean}."""
    return {prefix + name: float(mean) for name, mean in zip(names, values.mean(axis=0), strict=True)}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What FLOPs depend on. layer_parameters: those in one layer's matrix multiplications; head_width: vocabulary size or 1."""

    num_layers: int
    layer_parameters: int
    attention_width: int
    hidden_size: int
    head_width: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes, over all ranks: real tokens, causal query-key pairs, rows that reach the head, laid-out rows."""

    tokens: int
    attention_area: int
    scored_rows: int
    rows: int

    @staticmethod
    def of(lengths: np.ndarray, shared: np.ndarray, *, scores_tokens: bool, padding: int = 0) -> "Work":
        """Work of groups with lengths [num_groups, 1 + K] (the prompt, then each completion, 0 where it has fewer than K);
        shared [num_groups]: prompt laid out once."""
        prompt, completions = lengths[:, 0].astype(np.int64), lengths[:, 1:].astype(np.int64)
        number = np.count_nonzero(completions, axis=1)
        copies = np.where(shared, 1, number)
        tokens = int((copies * prompt).sum() + completions.sum())
        own = (completions * (completions + 1) // 2 + completions * prompt[:, None]).sum(1)
        area = copies * prompt * (prompt + 1) // 2 + own
        scored = int(completions.sum()) if scores_tokens else int(number.sum())
        return Work(tokens=tokens, attention_area=int(area.sum()), scored_rows=scored, rows=tokens + padding)

    def training_flops(self, shape: ModelShape) -> float:
        """Forward and backward, floating-point operations: 6 per parameter and token, 12 per attention entry and width."""
        layers = shape.num_layers * (
            6.0 * shape.layer_parameters * self.tokens + 12.0 * shape.attention_width * self.attention_area
        )
        return layers + 6.0 * shape.hidden_size * shape.head_width * self.scored_rows


def throughput(
    work: Work, shape: ModelShape, *, seconds: float, num_pairs: int, world_size: int, peak_tflops: float
) -> dict[str, float]:
    """`perf/*` of one step that took `seconds`; peak_tflops is one device's, in TFLOP/s."""
    tflops = work.training_flops(shape) / seconds / world_size / 1e12
    return {
        "perf/step_time_s": seconds,
        "perf/pairs_per_s": num_pairs / seconds,
        "perf/tokens_per_s_per_gpu": work.tokens / seconds / world_size,
        "perf/tflops_per_gpu": tflops,
        "perf/mfu": tflops / peak_tflops,
        "perf/packing_efficiency": work.tokens / work.rows,
    }
