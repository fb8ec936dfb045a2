"""relax against TRL's DPOTrainer and RewardTrainer on CPU: one command, a table, and JSON with every step.

    python benchmarks/vs_trl.py --model DIR --pairs FILE --objective dpo rm --dtype bf16 fp32 --output results.json

Strategy: each side lives in a process of its own and they take turns, one step each, on the same pairs; after a warm-up
each, a step gives one ratio, and the result is the median of the ratios. A machine that slows down for a while then slows
both sides of a ratio. Nothing else should run meanwhile.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe_machine, gemm_rates, versions
from sides import Settings, Turn, run_relax, run_trl
from tables import heading, notes, table
from tiny_qwen3 import make_tiny_qwen3
from worker import Seconds, Worker, WorkerFailed

from relax.cli.command import Group, Parser, run_command
from relax.errors import UserError

TINY = "tiny-qwen3"


@dataclass(frozen=True, slots=True)
class Side:
    """One line of the table: seconds of each counted step, and what a step does."""

    name: str
    steps: list[Seconds]
    peak_rss_gib: float
    flops: float | None = None  # of a step, where counted


def main() -> None:
    """Parse, measure, show."""
    args = parse_args()
    quiet_environment(args.threads)
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as directory:
        scratch = Path(directory)
        report: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": sys.argv,
            "machine": describe_machine(),
            "versions": versions(),
            "threads": args.threads,
        }
        ask = partial(_ask_once, scratch=scratch, timeout=args.timeout)
        report["gemm_tflops"] = ask("matrix rates", gemm_rates, args.threads)
        model = args.model
        if str(model) == TINY:
            model = scratch / TINY
            ask(TINY, make_tiny_qwen3, model, args.pairs, args.tokenizer)
        print(heading(report))
        report["results"] = []
        for objective in args.objective:
            for dtype in args.dtype:
                settings = settings_of(args, objective=objective, dtype=dtype, model=model, scratch=scratch)
                result = compare(
                    settings, warm_up=args.warm_up, name=args.model.name, timeout=args.timeout, rates=report["gemm_tflops"]
                )
                report["results"].append(result)
                print(table(result), flush=True)
                if args.output:  # a long comparison that fails keeps what was measured before it
                    args.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
        print("\n" + "\n".join(f"- {note}" for note in notes(report)))
        if args.output:
            report["notes"] = notes(report)
            args.output.write_text(json.dumps(report, indent=1, default=str) + "\n")


def parse_args() -> Any:
    parser = Parser(prog="python benchmarks/vs_trl.py", description=__doc__.splitlines()[0])
    group = Group(parser, "what is compared")
    group.directory("--model", f"Hugging Face model directory, or {TINY}: random weights, vocabulary 151,936 (required)")
    group.directory("--tokenizer", f"tokenizer of {TINY} (default: one learnt from --pairs, which then is a file of text)")
    group.directory("--pairs", "preference pairs, taken in the file's order (required)")
    group.other("--objective", nargs="+", choices=["dpo", "rm"], default=["dpo"], help="what to train")
    group.other("--dtype", nargs="+", choices=["bf16", "fp32"], default=["bf16"], help="dtype of the weights")
    group.whole("--pairs-per-step", 8, "pairs in a step, one batch on both sides")
    group.whole("--max-length", 512, "tokens of a prompt and its longer answer")
    group.whole("--max-completion-length", None, "tokens of an answer (default: three quarters of --max-length)")
    group.whole("--max-tokens-per-gpu", 8192, "relax's token budget of a micro-batch")
    group = Group(parser, "how it is measured")
    group.whole("--steps", 5, "counted steps")
    group.whole("--warm-up", 1, "steps before them that are not counted; 0 where one takes TRL half an hour", at_least=0)
    group.whole("--threads", os.cpu_count() or 1, "threads of each side, which never compute together")
    group.whole("--timeout", 1800, "seconds to wait for any one answer: a step, or a side that gets ready")
    group.directory("--output", "JSON file with every step, the machine and the versions")
    args = parser.parse()
    for flag in ("model", "pairs"):
        if getattr(args, flag) is None:
            raise UserError(f"--{flag} is required; see --help")
    if not args.pairs.exists():
        raise UserError(f"--pairs {args.pairs}: no such file")
    if args.tokenizer and str(args.model) != TINY:
        raise UserError(f"--tokenizer is for --model {TINY}; {args.model} brings its own")
    if args.output and not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: its directory does not exist")
    return args


def settings_of(args: Any, *, objective: str, dtype: str, model: Path, scratch: Path) -> Settings:
    """What both sides are told; each comparison has a scratch directory of its own."""
    scratch = scratch / f"{objective}-{dtype}"
    scratch.mkdir()
    return Settings(
        objective=objective,
        dtype=dtype,
        model=model,
        pairs=args.pairs,
        scratch=scratch,
        pairs_per_step=args.pairs_per_step,
        steps=args.steps + args.warm_up,
        max_length=args.max_length,
        max_completion_length=args.max_completion_length or max(1, args.max_length * 3 // 4),
        max_tokens=args.max_tokens_per_gpu,
        threads=args.threads,
    )


def quiet_environment(threads: int) -> None:
    """What the workers inherit: their threads, relax's huge pages for both sides, no network, no progress bars."""
    os.environ |= {
        "THP_MEM_ALLOC_ENABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "WANDB_MODE": "disabled",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _ask_once(name: str, function: Any, *args: Any, scratch: Path, timeout: float) -> Any:
    with Worker(name, function, *args, log=scratch / "worker.log") as worker:
        return worker.answer(timeout=timeout)


def compare(settings: Settings, *, warm_up: int, name: str, timeout: float, rates: dict[str, float]) -> dict[str, Any]:
    """Start both sides, alternate, sum up."""
    with Worker("relax", run_relax, settings, log=settings.scratch / "relax.log") as ours:
        parameters = ours.answer(timeout=timeout)
        with Worker("TRL", run_trl, settings, log=settings.scratch / "trl.log") as theirs:
            theirs.answer(timeout=timeout)
            turns = list(_alternate(ours, theirs, steps=settings.steps, warm_up=warm_up, timeout=timeout))
    counted = turns[warm_up:]
    sides = sides_of(counted)
    return {
        "model": name,
        "parameters": parameters,
        **{k: v for k, v in asdict(settings).items() if k not in ("model", "scratch")},
        "tokens_per_step": statistics.median(ours.tokens for ours, _ in counted),
        "steps": [{"relax": asdict(ours), "trl": asdict(theirs)} for ours, theirs in turns],
        "summary": [summarise(side, sides[-1], settings, tokens=[t.tokens for t, _ in counted], rates=rates) for side in sides],
    }


def _alternate(ours: Worker, theirs: Worker, *, steps: int, warm_up: int, timeout: float) -> Iterator[tuple[Turn, Turn]]:
    for step in range(1, steps + 1):
        pair = ours.turn(timeout=timeout), theirs.turn(timeout=timeout)
        seconds = " and ".join(f"{turn.step.wall:.2f}" for turn in pair)
        print(f"step {step} of {steps}: {seconds} s" + ", not counted" * (step <= warm_up), file=sys.stderr, flush=True)
        yield pair


def sides_of(turns: list[tuple[Turn, Turn]]) -> list[Side]:
    """The table's lines; TRL's is the last."""
    ours, theirs = [list(column) for column in zip(*turns, strict=True)]
    flops = statistics.median(turn.flops for turn in ours)
    peak = ours[-1].peak_rss_gib
    sides = []
    if ours[0].reference:  # the pass is a forward: a third of what forward and backward cost
        steps = [turn.step + turn.reference for turn in ours]
        sides.append(Side("relax, with one epoch's reference pass", steps, peak, flops * 4 / 3))
    name = "relax, reference known" if sides else "relax"
    sides.append(Side(name, [turn.step for turn in ours], peak, flops))
    return [*sides, Side("TRL", [turn.step for turn in theirs], theirs[-1].peak_rss_gib)]


def summarise(side: Side, theirs: Side, settings: Settings, *, tokens: list[int], rates: dict[str, float]) -> dict[str, Any]:
    """Medians over the counted steps of what each step gives; ratios are TRL's seconds over this side's, step by step."""

    def ratios(clock: str) -> list[float]:
        return [getattr(b, clock) / getattr(a, clock) for a, b in zip(side.steps, theirs.steps, strict=True)]

    def median(clock: str) -> float:
        return statistics.median(getattr(step, clock) for step in side.steps)

    rate = side.flops / median("wall") / 1e12 if side.flops else None
    return {
        "side": side.name,
        "wall_s": median("wall"),
        "cpu_s": median("cpu"),
        "pairs_per_s": settings.pairs_per_step / median("wall"),
        "tokens_per_s": statistics.median(n / step.wall for n, step in zip(tokens, side.steps, strict=True)),
        "tokens_per_cpu_s": statistics.median(n / step.cpu for n, step in zip(tokens, side.steps, strict=True)),
        "peak_rss_gib": side.peak_rss_gib,
        "peak_rss_of_trl": side.peak_rss_gib / theirs.peak_rss_gib,
        "speedup_wall": statistics.median(ratios("wall")),
        "speedup_wall_range": [min(ratios("wall")), max(ratios("wall"))],
        "speedup_cpu": statistics.median(ratios("cpu")),
        "speedup_cpu_range": [min(ratios("cpu")), max(ratios("cpu"))],
        "tflops": rate,
        "share_of_gemm": {dtype: rate / peak for dtype, peak in rates.items()} if rate else None,
    }


def run() -> None:
    """`main`, with a worker's failure as one message; however it ends, the workers and the scratch directory go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"vs_trl: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_command(run)
