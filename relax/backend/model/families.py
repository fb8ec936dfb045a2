"""The model families: what tells an architecture apart, one record each, and what is read of a Hugging Face config.

All families are decoders of RMSNorm, rotary embedding, grouped-query attention and SwiGLU. A config that asks for anything that
the model does not compute exactly is refused. Nothing here needs megatron: a dry run plans with it alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from relax.errors import UserError
from relax.metrics import ModelShape
from relax.objectives.base import Head

HFConfig: TypeAlias = transformers.PretrainedConfig
Rules = dict[str, bool]  # what a config asks for that is not computed -> whether this one does


def _nothing(config: HFConfig) -> Rules:
    return {}


def _attention_bias(config: HFConfig) -> Rules:
    return {"attention_bias true": bool(getattr(config, "attention_bias", False))}


def _dense_layers(config: HFConfig) -> Rules:
    return {
        **_attention_bias(config),
        f"decoder_sparse_step {config.decoder_sparse_step} (only 1)": config.decoder_sparse_step != 1,
        f"mlp_only_layers {config.mlp_only_layers} (only none)": bool(config.mlp_only_layers),
        "num_experts_per_tok 1 with norm_topk_prob": config.num_experts_per_tok == 1 and config.norm_topk_prob,
    }


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, by what differs between them.

    qk_norm: queries and keys are normed by head. qkv_bias: query, key and value have biases. experts: every layer's MLP is a
    mixture of experts. window: `sliding_window` holds without `use_sliding_window`. refused: what this family's configs may ask
    for beyond what is computed.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    window: bool = False
    refused: Callable[[HFConfig], Rules] = _attention_bias


FAMILIES = {  # by the `model_type` of config.json
    "llama": Family(),
    "mistral": Family(window=True),
    "qwen2": Family(qkv_bias=True, refused=_nothing),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True, refused=_dense_layers),
}


def family_of(config: HFConfig) -> Family:
    return FAMILIES[config.model_type]


def read_hf_config(directory: Path) -> HFConfig:
    """The config of a Hugging Face model directory; UserError where it is missing, unreadable or of no known family.

    Code that comes with the directory never runs.
    """
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: no config.json there; --hf-checkpoint takes a Hugging Face model directory")
    known = ", ".join(FAMILIES)
    try:
        kind = transformers.PretrainedConfig.get_config_dict(directory, local_files_only=True)[0].get("model_type")
        if kind not in FAMILIES:  # before transformers advises to trust the directory's code, or to upgrade
            raise UserError(f"{directory}/config.json: model_type {kind!r} is not supported; families: {known}")
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{directory}/config.json: not a config relax can read ({error}); families: {known}") from None
    _refuse_unsupported(config, where=f"{directory}/config.json")
    return config


def _refuse_unsupported(config: HFConfig, *, where: str) -> None:
    rope = config.rope_parameters
    rules = {
        f"hidden_act {config.hidden_act!r} (only silu)": config.hidden_act != "silu",
        "mlp_bias true": bool(getattr(config, "mlp_bias", False)),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) not in (None, 1.0),
        f"rope_type {rope['rope_type']!r} (only default, linear, llama3)": rope["rope_type"]
        not in ("default", "linear", "llama3"),
        **family_of(config).refused(config),
    }
    for what, present in rules.items():
        if present:
            raise UserError(f"{where}: {what} is not supported")


def attention_window(config: HFConfig) -> int | None:
    """The longest sequence [tokens] for which full attention equals the model's own; None where there is no limit."""
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", family_of(config).window) else None


def inverse_frequencies(config: HFConfig) -> torch.Tensor:
    """RoPE inverse frequencies [head_dim / 2], fp32 (Su 2021; scaled as the config says, by transformers' own functions)."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        inverse, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        return inverse.float()
    dim = head_dim(config)
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def head_dim(config: HFConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention_widths(config: HFConfig) -> tuple[int, int]:
    """Outputs of the query projection, and of the key's or the value's."""
    return config.num_attention_heads * head_dim(config), config.num_key_value_heads * head_dim(config)


def model_shape(config: HFConfig, *, head: Head) -> ModelShape:
    """What the model's FLOPs depend on."""
    width, key_value = attention_widths(config)
    hidden = config.hidden_size
    if family_of(config).experts:  # a token meets the router and the experts that it chose
        inner = hidden * config.num_experts + 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    else:
        inner = 3 * hidden * config.intermediate_size
    return ModelShape(
        num_layers=config.num_hidden_layers,
        layer_parameters=hidden * (2 * width + 2 * key_value) + inner,
        attention_width=width,
        hidden_size=hidden,
        head_width=config.vocab_size if head == "lm" else 1,
    )
