"""Numbers about a step: means over pairs, and honest throughput.

Invariants: every pair metric is one mean over all pairs of the global batch or evaluation set, never a mean of means; tokens
are real ones (a shared prompt once, padding never); FLOPs are those the objective needs: the vocabulary only where a
completion token is predicted, a prompt twice only where it is laid out twice.
"""

from dataclasses import dataclass

import numpy as np


def pair_means(values: np.ndarray, names: tuple[str, ...], *, prefix: str) -> dict[str, float]:
    """Means over pairs of values [num_pairs, metrics], as {prefix + name: mean}."""
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
        """Work of pairs with lengths [num_pairs, 3] (prompt, chosen, rejected); shared [num_pairs]: prompt laid out once."""
        prompt, answers = lengths[:, 0].astype(np.int64), lengths[:, 1:].astype(np.int64)
        copies = np.where(shared, 1, 2)
        tokens = int((copies * prompt).sum() + answers.sum())
        area = copies * prompt * (prompt + 1) // 2 + (answers * (answers + 1) // 2 + answers * prompt[:, None]).sum(1)
        scored = int(answers.sum()) if scores_tokens else 2 * len(lengths)
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
