"""How a step's cost grows with tokens, vocabulary and pairs, and planning with ranks: one command, three tables, and JSON.

    python benchmarks/scaling.py [--output results.json]

Strategy: a small Llama with random weights takes DPO steps, each size in a process of its own, so that its peak memory is its
own; what one short pair needs is told apart from what the step adds. Planning is simulated for an epoch of a million pairs,
whose lengths are drawn from real ones. What a run does with its data but compute (open the cache, look its reference numbers
up, find the pairs of a step) is timed over sets of up to ten million short pairs, each once the table is full.
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

from relax.cli.command import Group, Parser, run_command
from relax.packing import group_costs, laid_out_tokens, plan_step, shares_prompt

BUDGET, AREA_COST, ROW_MULTIPLE = 8192, 1 / 6144, 16  # tokens of a micro-batch; hidden size 1024; tensor 4 with context 2
# (what grows, pairs, tokens of the prompt, of each answer, vocabulary)
SIZES = (
    *(("pairs", pairs, 100, 150, 4096) for pairs in (16, 32, 64, 128)),
    *(("tokens of a pair", 4, answer // 2, answer, 4096) for answer in (200, 400, 800, 1600)),
    *(("vocabulary", 5, 100, 150, size) for size in (16_384, 65_536, 151_936)),
    *(("vocabulary, 4x the tokens", 20, 100, 150, size) for size in (16_384, 65_536, 151_936)),
)
SETS, STEP = (61_000, 1_000_000, 10_000_000), 32  # pairs of a data set, of a step
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
        "data": [],
        "plans": [],
    }
    with tempfile.TemporaryDirectory(prefix="scaling-") as scratch:
        show_steps(args.steps, report["steps"], scratch=Path(scratch))
        show_data(report["data"], scratch=Path(scratch))
    show_plans(args.pairs, report["plans"])
    if args.output:
        args.output.write_text(json.dumps(report, indent=1, default=str) + "\n")


def show_steps(steps: int, report: list[dict[str, Any]], *, scratch: Path) -> None:
    """The cost of a step over SIZES."""
    print("| what grows | pairs | of tokens | vocabulary | tokens a step | CPU s | CPU ms a token | peak GiB | of it added |")
    print("| --- |" + " ---: |" * 8)
    for name, pairs, prompt, answer, vocabulary in SIZES:
        sizes = (pairs, prompt, answer, vocabulary)
        with Worker(name, measure_step, *sizes, steps, log=scratch / "worker.log") as worker:
            step = worker.answer(timeout=600)
        report.append({"grows": name, "pairs": pairs, "vocabulary": vocabulary, **step})
        print(
            f"| {name} | {pairs} | {prompt + 2 * answer} | {vocabulary:,} | {step['tokens']:,} | {step['cpu_s']:.2f} "
            f"| {1000 * step['cpu_s'] / step['tokens']:.3f} | {step['peak_gib']:.2f} | {step['added_gib']:.2f} |",
            flush=True,
        )


def show_data(report: list[dict[str, Any]], *, scratch: Path) -> None:
    """What the data cost beside computing, over SETS."""
    print(
        "\n| pairs | check and open the cache, s | read a full table, s | find that nothing lacks, s | order an epoch, s",
        end="",
    )
    print(" | ms a step (worst) | peak GiB |\n|" + " ---: |" * 7)
    for pairs in SETS:
        with Worker(f"{pairs} pairs", measure_data, pairs, scratch / str(pairs), log=scratch / "worker.log") as worker:
            found = worker.answer(timeout=3600)
        report.append({"pairs": pairs, **found})
        print(
            f"| {pairs:,} | {found['open_s']:.2f} | {found['table_s']:.2f} | {found['pass_s']:.2f} | {found['order_s']:.2f} "
            f"| {found['step_ms']:.2f} ({found['worst_step_ms']:.2f}) | {found['peak_gib']:.2f} |",
            flush=True,
        )


def show_plans(pairs: int, report: list[dict[str, Any]]) -> None:
    """Planning, over PLANS."""
    print("\n| ranks | pairs a step | budget | steps | slowest rank over the mean (worst) | rows that are tokens", end="")
    print(" | micro-batches over the least | CPU ms a step | CPU s an epoch |\n|" + " ---: |" * 9)
    for ranks, batch, budget in PLANS:
        plan = simulate(ranks, min(batch, pairs), budget, pairs=pairs)
        report.append({"ranks": ranks, "pairs": batch, "budget": budget, **plan})
        print(
            f"| {ranks:,} | {batch:,} | {budget:,} | {plan['steps']:,} | {plan['balance']:.3f} ({plan['worst_balance']:.3f}) "
            f"| {plan['real']:.1%} | {plan['microbatches']:.2f} | {plan['ms']:.2f} | {plan['epoch_s']:.1f} |",
            flush=True,
        )


def measure_data(turns: Turns, pairs: int, directory: Path) -> None:
    """A worker's function: replies with the seconds of everything that a run does with a data set before and in its steps."""
    from relax.data.data_report import DataReport
    from relax.data.dataset import EntryWriter, GroupBlock, GroupDataset, entry_problem
    from relax.reference.fill import fill_table
    from relax.reference.table import ReferenceTable
    from relax.training.batches import Batches, Packing

    draw = np.random.default_rng(0)
    nothing: dict[str, Any] = {"rejected": {}, "marks": {}, "unused_columns": {}, "tokens": {}}
    with EntryWriter(directory / "entry") as writer:
        for first in range(0, pairs, 1_000_000):
            count = min(1_000_000, pairs - first)
            lengths = draw.integers(1, 7, (count, 3), dtype=np.int32)
            tokens = draw.integers(0, 50_000, lengths.sum(), dtype=np.int32)
            hashes = draw.integers(0, 256, (count, 16), dtype=np.uint8)
            writer.add(GroupBlock(tokens=tokens, lengths=lengths, trained=lengths[:, 1:], hashes=hashes))
        writer.publish(DataReport(title="train", files=(), rows_kept=pairs, **nothing))
    table = ReferenceTable(np.load(directory / "entry" / "hashes.npy"), width=2, path=directory / "table")
    table.put(np.arange(pairs), np.zeros((pairs, 2)))
    table.seal()
    del table

    start = time.perf_counter()
    assert entry_problem(directory / "entry") is None
    dataset = GroupDataset.open(directory / "entry", paths=[], title="train")
    opened = time.perf_counter()
    packs = Packing(
        dp_size=1, max_tokens=BUDGET, share_prompt=True, microbatch_multiple=1, area_cost=AREA_COST, row_multiple=ROW_MULTIPLE
    )
    batches = Batches(dataset=dataset, packing=packs, batch_size=STEP, seed=0, shuffle=True)
    batches.table = ReferenceTable(dataset.hashes, width=2, path=directory / "table")
    looked_up = time.perf_counter()
    engine: Any = None  # nothing is left to score
    assert fill_table(engine, batches, steps=range(1, 3 * batches.steps_per_epoch), after_each=lambda: None) == 0
    passed = time.perf_counter()
    batches.indices(1)
    times = [time.perf_counter()]
    for step in range(1, 1001):
        batch = batches.batch(batches.indices(step)[1])
        assert all(len(batch.groups[i].prompt) for i in range(len(batch.groups)))
        times.append(time.perf_counter())
    step_ms = 1000 * np.diff(times)
    turns.reply(
        {
            "open_s": opened - start,
            "table_s": looked_up - opened,
            "pass_s": passed - looked_up,
            "order_s": times[0] - passed,
            "step_ms": float(np.median(step_ms)),
            "worst_step_ms": float(step_ms.max()),
            "peak_gib": peak_rss_gib(),
        }
    )


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
        each, tokens = group_costs(lengths, shared, area_cost=AREA_COST), laid_out_tokens(lengths, shared)
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
