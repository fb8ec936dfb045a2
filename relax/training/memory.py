"""What a rank holds under a layout, from the model's config alone: parameters, gradients, optimizer state, activations.

Ranks of one pipeline stage hold like amounts. Invariants:
- Parameters are counted as the engine builds them, and with them the bytes of gradients (fp32) and optimizer state (fp32
  master weights beside bf16, Adam's two moments), but for the padding of megatron-core's buffers.
- Activations are an upper estimate for full micro-batches and experts that are called equally often. What a GPU needs besides
  (CUDA itself, communication buffers, fragmentation, busier experts) is not in it.
"""

from dataclasses import dataclass

from relax.backend.model.families import HFConfig, attention_widths, family_of, head_dim
from relax.backend.parallel import ParallelConfig
from relax.objectives.base import Head


@dataclass(frozen=True, slots=True)
class Recompute:
    """--recompute-granularity full by --recompute-method over --recompute-num-layers; method None: nothing, or selective."""

    method: str | None = None
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one rank: those that data-parallel ranks have alike, and its experts'."""

    shared: int
    experts: int = 0

    @property
    def total(self) -> int:
        return self.shared + self.experts


def stage_parameters(config: HFConfig, layout: ParallelConfig, *, head: Head, stage: int) -> Parameters:
    """What a rank of pipeline stage `stage` (from 0) holds."""
    hidden, tensor, layers = config.hidden_size, layout.tensor, config.num_hidden_layers // layout.pipeline
    family, (width, key_value) = family_of(config), attention_widths(config)
    projected = (width + 2 * key_value) // tensor
    layer = hidden * (projected + width // tensor) + 2 * hidden
    layer += projected * family.qkv_bias + 2 * head_dim(config) * family.qk_norm
    experts = 0
    if family.experts:
        layer += hidden * config.num_experts  # the router, which every rank holds whole
        width = config.moe_intermediate_size // (layout.expert_tensor or tensor)
        experts = config.num_experts // layout.expert * 3 * hidden * width
    else:
        layer += 3 * hidden * config.intermediate_size // tensor
    vocabulary = -(-config.vocab_size // tensor) * hidden
    first, last = stage == 0, stage == layout.pipeline - 1
    outer = vocabulary * first + hidden * last
    if last and head == "scalar":
        outer += hidden
    elif last and not (first and config.tie_word_embeddings):
        outer += vocabulary
    return Parameters(layers * layer + outer, layers * experts)


def stage_bytes(
    config: HFConfig,
    layout: ParallelConfig,
    *,
    head: Head,
    stage: int,
    world_size: int,
    bf16: bool,
    distributed_optimizer: bool,
    recompute: Recompute,
    max_tokens: int,
) -> dict[str, float]:
    """Bytes of a rank of pipeline stage `stage` while it trains, by what they are; max_tokens per micro-batch and rank."""
    held = stage_parameters(config, layout, head=head, stage=stage)
    width = 2 if bf16 else 4
    replicas = world_size // (layout.tensor * layout.pipeline)
    expert_replicas = world_size // ((layout.expert_tensor or layout.tensor) * layout.expert * layout.pipeline)
    if not distributed_optimizer:
        replicas = expert_replicas = 1
    state = (4 if bf16 else 0) + 8
    return {
        "parameters": held.total * width,
        "gradients, fp32": held.total * 4,
        "master weights and Adam moments, fp32": state * (held.shared / replicas + held.experts / expert_replicas),
        "activations": max_tokens * width * _kept_per_token(config, layout, recompute, stage=stage),
    }


def _kept_per_token(config: HFConfig, layout: ParallelConfig, recompute: Recompute, *, stage: int) -> float:
    """Values that a stage keeps for backward at its fullest moment, per token of a micro-batch."""
    layers, chunks = config.num_hidden_layers // layout.pipeline, layout.virtual_stages(config.num_hidden_layers) or 1
    ahead = layout.pipeline - 1 - stage  # forward passes before the first backward one, in chunks of the stage's layers
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * layout.pipeline
    in_flight = (ahead + 1) * layers / chunks
    whole = layer_activations(config, layout)
    kept = config.hidden_size / (layout.tensor if layout.sequence else 1)
    if recompute.method == "uniform":  # inputs of each unit, and the unit that backward is in
        return in_flight / recompute.num_layers * kept + recompute.num_layers * whole
    if recompute.method == "block":  # the first layers of each stage
        share = min(1.0, recompute.num_layers / (layers / chunks))
        return in_flight * (share * kept + (1 - share) * whole) + whole
    return in_flight * whole


def layer_activations(config: HFConfig, layout: ParallelConfig) -> float:
    """Values that one layer keeps for its backward, per token: the norms' inputs and outputs; query, key and value as they are
    projected, normed, rotated and laid out; attention's output; the gated MLP's inner values, an expert's for each of its
    tokens."""
    hidden, family, (width, key_value) = config.hidden_size, family_of(config), attention_widths(config)
    between = 6 * hidden / (layout.tensor if layout.sequence else 1)
    inner = (3 + family.qk_norm) * width + (4 + family.qk_norm) * key_value
    if family.experts:
        inner += config.num_experts_per_tok * (4 * hidden + 4 * config.moe_intermediate_size)
    else:
        inner += 3 * config.intermediate_size
    return between + inner / layout.tensor
