"""Tiny random Hugging Face models, saved as users' checkpoints are, and ours that load them.

Every tensor is random, norms and biases included, so that a swapped or transposed one shows in the scores; the head
size is not hidden / heads where the family allows it, and query groups are fewer than heads.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from relax.backend.model.families import read_hf_config
from relax.backend.model.layout import build_layout
from relax.backend.model.preference_model import PreferenceModel, transformer_config
from relax.backend.ops import Ops, choose_ops
from relax.backend.weights.hugging_face import load_hf_weights


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A pair as the layout reads it."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def completions(self) -> tuple[np.ndarray, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """A prompt with any number of completions, as the layout reads it."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]


END, PAD = "<|im_end|>", "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
VOCABULARY = 272


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """A config of `family` ("llama", ...): 2 layers, 4 heads of 16 in 2 groups, hidden size 48; 2 of 4 experts of width 24."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    if family != "qwen2":  # the one family without a head size of its own
        values["head_dim"] = 16
    if family == "mistral":
        values["sliding_window"] = None
    if family == "qwen3_moe":
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return transformers.AutoConfig.for_model(family, **{**values, **overrides})


def tiny_model(
    config: transformers.PretrainedConfig, *, head: str = "lm", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """The stock model of `config` with every tensor random: matrices about 0.08, norms and biases about 0.3."""
    if head == "scalar":
        config.num_labels = 1
    auto = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    model = auto.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.08 if parameter.dim() > 1 else noise * 0.3 + float(name.endswith("norm.weight")))
    return model.to(dtype)


def save_tiny(
    directory: Path,
    family: str,
    *,
    head: str = "lm",
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    pad: str = PAD,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Save a tiny model and its tokenizer; returns the stock model, in eval mode."""
    model = tiny_model(tiny_config(family, **overrides), head=head, dtype=dtype, seed=seed)
    model.save_pretrained(directory, max_shard_size=shard_size)
    save_tokenizer(directory, pad=pad)
    return model


def save_tokenizer(directory: Path, *, pad: str = PAD) -> None:
    """A byte-level ChatML tokenizer: ids 0..255 are bytes, then END, PAD, <|im_start|> and <|fim_pad|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=pad,
        chat_template=CHATML,
        extra_special_tokens=[],
    )
    fast.add_special_tokens({"additional_special_tokens": [PAD, END, "<|im_start|>", "<|fim_pad|>"]})
    fast.save_pretrained(directory)


def random_pairs(count: int = 3, *, vocab_size: int = VOCABULARY, seed: int = 0) -> list[TokenPair]:
    """Pairs of different lengths with ids over the whole vocabulary, its first and last among them."""
    rng = np.random.default_rng(seed)
    pairs = []
    for i in range(count):
        prompt, chosen, rejected = (rng.integers(0, vocab_size, n).astype(np.int32) for n in (5 + i, 3 + 2 * i, 7 - i))
        chosen[0], rejected[-1] = 0, vocab_size - 1
        pairs.append(TokenPair(prompt=prompt, chosen=chosen, rejected=rejected))
    return pairs


def ops_for(dtype: torch.dtype) -> Ops:
    """The operators of a run on this CPU."""
    return choose_ops(torch.device("cpu"), dtype, head_dim=8)


def load(directory: Path, *, head: Any = "lm", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreferenceModel:
    """Our model with the directory's weights; needs the `on_cpu` fixture."""
    config = read_hf_config(directory)
    model = PreferenceModel(transformer_config(config, dtype=dtype, ops=ops_for(dtype)), config, head=head).eval()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # what a load leaves out shows
    load_hf_weights([model], directory, config, seed=seed)
    return model


@torch.no_grad()
def scores(model: PreferenceModel, pairs: Any) -> torch.Tensor:
    """Scores [num_sequences] of one pack."""
    layout = build_layout(pairs, [False] * len(pairs), head=model.head, device=torch.device("cpu"))
    return model(layout.ids[None], None, None, packed_seq_params=layout)


@torch.no_grad()
def stock_logps(stock: Any, pairs: Any) -> torch.Tensor:
    """Summed log-probabilities [2 * num_pairs] of the completions under a stock model, summed in fp64."""
    values = []
    for pair in pairs:
        for completion in (pair.chosen, pair.rejected):
            ids = torch.tensor(np.concatenate((pair.prompt, completion)), dtype=torch.int64)
            logprobs = stock(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            values.append(logprobs[len(pair.prompt) - 1 :].sum())
    return torch.stack(values)
