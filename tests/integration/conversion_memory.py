"""Memory of a conversion: test_convert.py makes a tiny and a large model, and processes of their own convert both each way.

It prints one JSON object: by how many bytes each command raised the peak above the tiny model's.
"""

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from relax.backend.weights import export
from relax.backend.weights.tensor_files import write_tensors
from relax.commands.conversion import convert
from relax.convert import parse_args
from tests.models import save_tokenizer

SHARD = 50 * 10**6


def make(directory: Path, *, layers: int, hidden: int, experts: int = 0) -> None:
    """A bf16 checkpoint whose every weight is 1/2; experts are half as wide as the model."""
    import transformers

    values = {
        "vocab_size": 8 * hidden,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    of_experts = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    config = transformers.Qwen3MoeConfig(**values, **of_experts) if experts else transformers.Qwen3Config(**values)
    config.save_pretrained(directory)
    save_tokenizer(directory)
    with torch.device("meta"):
        named = transformers.AutoModelForCausalLM.from_config(config).named_parameters()
    shapes = {name: shape for parameter in named for name, shape in stored(*parameter)}
    halves = ((name, torch.full(shape, 0.5, dtype=torch.bfloat16)) for name, shape in shapes.items())
    write_tensors(directory, halves, shapes=shapes, dtype=torch.bfloat16, shard_bytes=SHARD)


def stored(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes under which a file holds it: experts apart, gate and up apart."""
    if ".experts." not in name:
        yield name, tuple(parameter.shape)
        return
    prefix, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    experts, rows, columns = parameter.shape
    for expert, part in itertools.product(range(experts), parts):
        yield f"{prefix}.{expert}.{part}.weight", (rows // len(parts), columns)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def raised(command: str, directory: Path) -> int:
    """By how much the large model's conversion raises this process's peak above the tiny model's."""
    export.write_tensors = functools.partial(write_tensors, shard_bytes=SHARD)
    peaks = []
    for source in (directory / "tiny", directory / "large"):
        there, back = source.with_suffix(".mcore"), source.with_suffix(".back")
        flags = {"hf-to-mcore": ("--save", there), "mcore-to-hf": ("--load", there, "--save", back)}[command]
        with contextlib.redirect_stdout(io.StringIO()):
            convert(parse_args([command, *map(str, flags), "--hf-checkpoint", str(source)]))
        peaks.append(peak())
    return peaks[1] - peaks[0]


def main(directory: Path) -> None:
    commands = ("hf-to-mcore", "mcore-to-hf")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # each has its own peak, from the imports'
        found = pool.starmap(raised, [(command, directory) for command in commands], chunksize=1)
    print(json.dumps(dict(zip(commands, found, strict=True))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
