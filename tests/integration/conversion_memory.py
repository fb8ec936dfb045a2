"""Memory of a conversion: test_convert.py makes a tiny and a large model, and a process of its own converts both ways.

It prints one JSON object: by how many bytes the large model's conversion raised the peak above the tiny model's.
"""

import contextlib
import functools
import io
import json
import resource
import sys
from pathlib import Path

import torch

from relax.backend import export
from relax.backend.tensor_files import write_tensors
from relax.conversion import convert
from relax.convert import parse_args
from tests.models import save_tokenizer

SHARD = 50 * 10**6


def make(directory: Path, *, layers: int, hidden: int) -> None:
    """A bf16 checkpoint whose every weight is 1/2."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=8 * hidden,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    config.save_pretrained(directory)
    save_tokenizer(directory)
    with torch.device("meta"):
        named = transformers.AutoModelForCausalLM.from_config(config).named_parameters()
    halves = ((name, torch.full(tensor.shape, 0.5, dtype=torch.bfloat16)) for name, tensor in named)
    write_tensors(directory, halves, shard_bytes=SHARD)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def there_and_back(source: Path) -> list[int]:
    """The peak after each direction."""
    there, back = source.with_suffix(".mcore"), source.with_suffix(".back")
    peaks = []
    for flags in (("hf-to-mcore", "--save", there), ("mcore-to-hf", "--load", there, "--save", back)):
        with contextlib.redirect_stdout(io.StringIO()):
            convert(parse_args([*map(str, flags), "--hf-checkpoint", str(source)]))
        peaks.append(peak())
    return peaks


def main(directory: Path) -> None:
    export.write_tensors = functools.partial(write_tensors, shard_bytes=SHARD)
    _, before = there_and_back(directory / "tiny")
    there, back = there_and_back(directory / "large")
    print(json.dumps({"to Megatron": there - before, "to Hugging Face": back - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
