"""Which parallel layouts work: rules of divisibility and the mixes that megatron-core gets wrong, in terms of flags.

Strategy: plain arithmetic on the flags, the world size and the HF config.json; no torch, no process group. Invariants:
- A layout that passes builds its process groups and splits its weights without remainder; the vocabulary is padded.
- MoE over tensor parallelism without sequence parallelism, which megatron-core refuses in its first step, is refused here.
"""

import argparse
from typing import Any

from relax.errors import UserError

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
CHUNK = "--num-layers-per-virtual-pipeline-stage"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def validate_layout(args: argparse.Namespace, world_size: int, model_config: dict[str, Any]) -> None:
    """Check the layout in `args` for `world_size` ranks and the model of an HF config.json. Raises UserError."""
    _check_ranks(args, world_size)
    _check_model(args, model_config)
    _check_experts(args, model_config)


def _check_ranks(args: argparse.Namespace, world_size: int) -> None:
    """What needs only the flags and the number of ranks."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    _fits(f"{TP} {tp} x {PP} {pp} x {CP} {cp}", tp * pp * cp, world_size)
    _fits(f"{ETP} {etp} x {EP} {ep} x {PP} {pp}", etp * ep * pp, world_size)
    if args.sequence_parallel and tp == 1:
        raise UserError(f"--sequence-parallel splits over tensor-parallel ranks: it needs {TP} above 1")
    if args.num_layers_per_virtual_pipeline_stage is not None and pp == 1:
        raise UserError(f"{CHUNK} interleaves pipeline stages: it needs {PP} above 1")


def _check_model(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """What the model's shape must allow: heads and feed-forward over TP, layers over PP and its chunks."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    heads, layers = _size(config, "num_attention_heads"), _size(config, "num_hidden_layers")
    _divides(TP, tp, "num_attention_heads", heads)
    _divides(TP, tp, "num_key_value_heads", _size(config, "num_key_value_heads", default=heads))
    if not _experts(config):
        _divides(TP, tp, "intermediate_size", _size(config, "intermediate_size"))
    _divides(PP, pp, "num_hidden_layers", layers)
    vocabulary = _size(config, "vocab_size")
    if vocabulary < tp:
        raise UserError(f"{TP} {tp} must not exceed the model's vocab_size ({vocabulary}): a rank would hold no token")
    chunk, stage = args.num_layers_per_virtual_pipeline_stage, layers // pp
    if chunk is not None and (stage % chunk or stage == chunk):
        raise UserError(
            f"{CHUNK} {chunk} must divide the {stage} layers of a pipeline stage (num_hidden_layers {layers} / {PP} "
            f"{pp}) and be smaller, so that each rank gets several chunks"
        )


def _check_experts(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """What needs a mixture of experts, and what its split must satisfy."""
    tp, ep, etp = args.tensor_model_parallel_size, args.expert_model_parallel_size, args.expert_tensor_parallel_size
    experts = _experts(config)
    if not experts:
        for flag, idle in ((EP, ep == 1), (ETP, etp == tp), ("--moe-aux-loss-coeff", args.moe_aux_loss_coeff == 0)):
            if not idle:
                raise UserError(f"{flag} needs a mixture-of-experts model, and config.json names no experts: drop the flag")
        return
    _divides(EP, ep, "number of experts", experts)
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    _divides(ETP, etp, width, _size(config, width))
    if tp > 1 and not args.sequence_parallel:
        raise UserError(f"a mixture-of-experts model with {TP} {tp} needs --sequence-parallel")


def _experts(config: dict[str, Any]) -> int:
    """Experts of a layer; 0 for a dense model."""
    return next((_size(config, key) for key in EXPERT_KEYS if config.get(key)), 0)


def _fits(sizes: str, product: int, world_size: int) -> None:
    if world_size % product:
        advice = f"start a multiple of {product} ranks or change the sizes"
        raise UserError(f"{sizes} = {product} must divide the world size {world_size}: {advice}")


def _divides(flag: str, size: int, what: str, total: int) -> None:
    if total % size:
        raise UserError(f"{flag} {size} must divide the model's {what} ({total})")


def _size(config: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"--hf-checkpoint: config.json must give {key} as a whole number, at least 1, not {value!r}")
    return value
