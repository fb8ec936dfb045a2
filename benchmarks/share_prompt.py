"""What sharing a pair's prompt between its answers saves: one command, a table, and JSON.

    python benchmarks/share_prompt.py --model DIR [--output results.json]

Strategy: the same pairs of random tokens take a training step with and without sharing, in turns on one engine; after one
warm-up each, a turn gives one ratio of CPU seconds, and the result is their median beside the ratio of laid-out tokens, which
bounds it where matrix products are all that counts.
"""

import json
import resource
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine

from relax.backend.device import select_device
from relax.backend.engine import Batch, Engine
from relax.backend.model.families import read_hf_config
from relax.backend.optimizer import OptimizerOptions
from relax.backend.parallel import ParallelConfig, initialize
from relax.backend.weights.hugging_face import load_hf_weights
from relax.cli.command import Group, Parser, run_command
from relax.errors import UserError
from relax.objectives import OBJECTIVES
from relax.packing import laid_out_tokens, plan_step, shares_prompt

HH = Path(__file__).parents[1] / "tests" / "unit" / "hh_lengths.csv"
OPTIMIZER = OptimizerOptions(
    lr=1e-7,
    min_lr=0.0,
    decay_style="constant",
    warmup_steps=0,
    total_steps=1000,
    weight_decay=0.0,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    clip_grad=1.0,
    distributed=False,
    overlap=False,
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def completions(self) -> tuple[np.ndarray, ...]:
        return self.chosen, self.rejected


def mixes(pairs: int) -> dict[str, np.ndarray]:
    """Lengths [pairs, 3] of prompt, chosen and rejected answer, none longer than 1,024 together with its prompt.

    HH's are real; the others are drawn from log-normal distributions: answers of some hundred tokens after shorter questions
    (as UltraFeedback has), documents with short answers, and questions too short to be worth sharing.
    """
    draw = np.random.default_rng(0)

    def lengths(prompt: int, answer: int) -> np.ndarray:
        drawn = np.stack([draw.lognormal(np.log(median), 0.6, pairs) for median in (prompt, answer, answer)], 1)
        return np.clip(drawn, 8, 512).astype(np.int64)

    real = np.loadtxt(HH, dtype=np.int64, delimiter=",", skiprows=1)[:pairs]
    return {
        "HH": np.clip(real, 1, 512),
        "UltraFeedback-like": lengths(110, 240),
        "long prompts": lengths(450, 60),
        "short prompts": lengths(20, 200),
    }


def main() -> None:
    parser = Parser(prog="python benchmarks/share_prompt.py", description=__doc__.splitlines()[0])
    group = Group(parser, "what is measured")
    group.directory("--model", "Hugging Face model directory (required)")
    group.other("--objective", choices=["dpo", "rm"], default="dpo", help="what to train")
    group.other("--dtype", choices=["bf16", "fp32"], default="fp32", help="dtype of the weights")
    group.other("--lengths", nargs="+", choices=list(mixes(1)), default=list(mixes(1)), help="mixes of lengths")
    group.whole("--pairs", 8, "pairs in a step")
    group.whole("--turns", 5, "counted turns, after one to warm up")
    group.whole("--max-tokens-per-gpu", 4096, "token budget of a micro-batch")
    group.choice("--device", ["auto", "cpu", "cuda"], "auto", "where to train")
    group.directory("--output", "JSON file")
    args = parser.parse()
    if args.model is None:
        raise UserError("--model is required; see --help")
    device = select_device(args.device)
    initialize(ParallelConfig(), device=device, seed=0)
    config = read_hf_config(args.model)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    engine = Engine(config, objective=OBJECTIVES[args.objective](), device=device, dtype=dtype, parallel=ParallelConfig())
    load_hf_weights(engine.chunks, args.model, config, seed=0)
    engine.prepare_training(OPTIMIZER)
    report: dict[str, Any] = {"machine": describe_machine(), "threads": torch.get_num_threads(), "results": []}
    print("| lengths | pairs shared | tokens, off / on | seconds, off / on | of the tokens' |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in args.lengths:
        lengths = mixes(args.pairs)[name]
        result = compare(engine, lengths, max_tokens=args.max_tokens_per_gpu, turns=args.turns)
        report["results"].append({"lengths": name, **result})
        print(
            f"| {name} | {result['shared']:.0%} | {result['tokens']:.3f} | {result['seconds']:.3f} "
            f"| {result['seconds'] / result['tokens']:.0%} |",
            flush=True,
        )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def compare(engine: Engine, lengths: np.ndarray, *, max_tokens: int, turns: int) -> dict[str, Any]:
    """Medians of off over on."""
    draw = np.random.default_rng(1)
    vocabulary = engine.hf_config.vocab_size
    pairs = [Pair(*(draw.integers(0, vocabulary, size) for size in sizes)) for sizes in lengths]
    shared = shares_prompt(lengths)
    references = np.full((len(pairs), 2), -100.0)
    batches = [
        Batch(pairs, plan_step(lengths, max_tokens=max_tokens, share_prompt=share), lengths, references)
        for share in (False, True)
    ]
    seconds = [[measure(engine, batch) for batch in batches] for _ in range(turns + 1)][1:]
    laid_out = [laid_out_tokens(lengths, shared & share).sum() for share in (False, True)]
    return {
        "shared": float(shared.mean()),
        "tokens": float(laid_out[0] / laid_out[1]),
        "seconds": statistics.median(off / on for off, on in seconds),
        "each_off_and_on": seconds,
    }


def measure(engine: Engine, batch: Batch) -> float:
    """Seconds of a step: of CPU time, which other work disturbs least; on a GPU of the clock."""
    if engine.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        engine.train_step(batch)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    before = resource.getrusage(resource.RUSAGE_SELF)
    engine.train_step(batch)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    run_command(main)
