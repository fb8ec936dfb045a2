"""A small Qwen3 with random weights and the family's full vocabulary: the vocabulary's cost is real, the rest is cheap."""

from collections.abc import Iterator
from pathlib import Path

from worker import Turns

VOCABULARY = 151_936
LEARNT_TOKENS = 16_384  # the tokenizer learns these from the data: real lengths without a download
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_qwen3(turns: Turns, directory: Path, pairs: Path, tokenizer: Path | None) -> None:
    """A worker's function: saves the model (42 M parameters, bf16) and a tokenizer, `tokenizer` or one learnt from `pairs`."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    if tokenizer:
        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True).save_pretrained(directory)
    else:
        _learn_tokenizer(directory, pairs)
    turns.reply(None)


def _learn_tokenizer(directory: Path, pairs: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def lines() -> Iterator[str]:
        with pairs.open(encoding="utf-8", errors="replace") as file:
            yield from file

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNT_TOKENS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
