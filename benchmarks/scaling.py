"""How a step's cost grows with tokens, vocabulary and pairs, and planning with ranks: one command, two tables, and JSON.

    python benchmarks/scaling.py [--output results.json]

Strategy: a small Llama with random weights takes DPO steps, each size in a process of its own, so that its peak memory is its
own; what one short pair needs is told apart from what the step adds. Planning is simulated for an epoch of a million pairs,
whose lengths are drawn from real ones.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine, versions
from share_prompt import HH, OPTIMIZER, Pair
from worker import Seconds, Turns, Worker, peak_rss_gib

from relax.command import Group, Parser, run_command
from relax.packing import laid_out_tokens, pair_costs, plan_step, shares_prompt

BUDGET, AREA_COST, ROW_MULTIPLE = 8192, 1 / 6144, 16  # tokens of a micro-batch; hidden size 1024; tensor 4 with context 2
# (what grows, pairs, tokens of the prompt, of each answer, vocabulary)
SIZES = (
    *(("pairs", pairs, 100, 150, 4096) for pairs in (16, 32, 64, 128)),
    *(("tokens of a pair", 4, answer // 2, answer, 4096) for answer in (200, 400, 800, 1600)),
    *(("vocabulary", 5, 100, 150, size) for size in (16_384, 65_536, 151_936)),
    *(("vocabulary, 4x the tokens", 20, 100, 150, size) for size in (16_384, 65_536, 151_936)),
)
PLANS = ((1, 32, 8192), (64, 512, 2048), (64, 512, 8192), (1024, 8192, 8192), (1024, 1_000_000, 8192))  # ranks, pairs, budget


def main() -> None:
    """Parse, measure, show."""
    parser = Parser(prog="python benchmarks/scaling.py", description=__doc__.splitlines()[0])
    group = Group(parser, "what is measured")
    group.whole("--steps", 3, "counted steps of each size, after one to warm up")
    group.whole("--pairs", 1_000_000, "pairs of the epoch that is planned")
    group.whole("--threads", os.cpu_count() or 1, "threads of a step")
    group.directory("--output", "JSON file with every number, the machine and the versions")
    args = parser.parse()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the workers inherit it
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": sys.argv,
        "machine": describe_machine(),
        "versions": versions(),
        "threads": args.threads,
        "steps": [],
        "plans": [],
    }
    print("| what grows | pairs | of tokens | vocabulary | tokens a step | CPU s | CPU ms a token | peak GiB | of it added |")
    print("| --- |" + " ---: |" * 8)
    with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
        for name, pairs, prompt, answer, vocabulary in SIZES:
            sizes = (pairs, prompt, answer, vocabulary)
            with Worker(name, measure_step, *sizes, args.steps, log=Path(scratch) / "worker.log") as worker:
                step = worker.answer(timeout=600)
            report["steps"].append({"grows": name, "pairs": pairs, "vocabulary": vocabulary, **step})
            print(
                f"| {name} | {pairs} | {prompt + 2 * answer} | {vocabulary:,} | {step['tokens']:,} | {step['cpu_s']:.2f} "
                f"| {1000 * step['cpu_s'] / step['tokens']:.3f} | {step['peak_gib']:.2f} | {step['added_gib']:.2f} |",
                flush=True,
            )
    print("\n| ranks | pairs a step | budget | steps | slowest rank over the mean (worst) | rows that are tokens", end="")
    print(" | micro-batches over the least | CPU ms a step | CPU s an epoch |\n|" + " ---: |" * 9)
    for ranks, batch, budget in PLANS:
        plan = simulate(ranks, min(batch, args.pairs), budget, pairs=args.pairs)
        report["plans"].append({"ranks": ranks, "pairs": batch, "budget": budget, **plan})
        print(
            f"| {ranks:,} | {batch:,} | {budget:,} | {plan['steps']:,} | {plan['balance']:.3f} ({plan['worst_balance']:.3f}) "
            f"| {plan['real']:.1%} | {plan['microbatches']:.2f} | {plan['ms']:.2f} | {plan['epoch_s']:.1f} |",
            flush=True,
        )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1, default=str) + "\n")


def measure_step(turns: Turns, pairs: int, prompt: int, answer: int, vocabulary: int, steps: int) -> None:
    """A worker's function: replies with the CPU seconds of a step (median), the peak memory and what the step added to it."""
    import torch
    from transformers import LlamaConfig

    from relax.backend.device import select_device
    from relax.backend.engine import Batch, Engine
    from relax.backend.parallel import ParallelConfig, initialize
    from relax.objectives import DPO

    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 4096}
    config, device = LlamaConfig(**heads, **sizes, tie_word_embeddings=True), select_device("cpu")
    initialize(ParallelConfig(), device=device, seed=0)
    engine = Engine(config, objective=DPO(), device=device, dtype=torch.float32, parallel=ParallelConfig())
    for parameter in engine.chunks[0].parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    engine.prepare_training(OPTIMIZER)
    draw = np.random.default_rng(0)

    def batch(lengths: np.ndarray) -> Batch:
        ids = [Pair(*(draw.integers(0, vocabulary, size) for size in row)) for row in lengths]
        return Batch(
            groups=ids, plan=plan_step(lengths, max_tokens=BUDGET), lengths=lengths, references=np.full((len(ids), 2), -100.0)
        )

    engine.train_step(batch(np.array([[8, 8, 8]])))
    before, large = peak_rss_gib(), batch(np.array([[prompt, answer, answer]] * pairs))
    seconds = []
    for _ in range(steps + 1):
        start = Seconds.now()
        engine.train_step(large)
        seconds.append(start.until_now().cpu)
    peak, tokens = peak_rss_gib(), pairs * (prompt + 2 * answer)
    turns.reply({"tokens": tokens, "cpu_s": statistics.median(seconds[1:]), "peak_gib": peak, "added_gib": peak - before})


def simulate(ranks: int, batch: int, budget: int, *, pairs: int) -> dict[str, float]:
    """Plan every whole step of an epoch: CPU time, balance and waste."""
    real = np.loadtxt(HH, dtype=np.int64, delimiter=",", skiprows=1)
    every = real[np.random.default_rng(0).integers(0, len(real), pairs)]
    seconds, balance, rows_real, microbatches = [], [], [], []
    for first in range(0, pairs - batch + 1, batch):
        lengths = every[first : first + batch]
        start = time.process_time()
        plan = plan_step(lengths, dp_size=ranks, max_tokens=budget, area_cost=AREA_COST)
        seconds.append(time.process_time() - start)
        shared = shares_prompt(lengths)
        each, tokens = pair_costs(lengths, shared, area_cost=AREA_COST), laid_out_tokens(lengths, shared)
        costs = np.array([sum(each[list(micro.groups)].sum() for micro in rank) for rank in plan.ranks])
        packs = np.array([[tokens[list(micro.groups)].sum() for micro in rank] for rank in plan.ranks])
        balance.append(costs.max() / costs.mean())
        rows_real.append(packs.sum() / (-(-packs // ROW_MULTIPLE) * ROW_MULTIPLE).sum())
        microbatches.append(packs.shape[1] / -(-packs.sum(1).max() // budget))
    return {
        "steps": len(seconds),
        "balance": float(np.median(balance)),
        "worst_balance": float(max(balance)),
        "real": float(np.mean(rows_real)),
        "microbatches": float(np.mean(microbatches)),
        "ms": 1000 * statistics.median(seconds),
        "epoch_s": sum(seconds),
    }


if __name__ == "__main__":
    run_command(main)
