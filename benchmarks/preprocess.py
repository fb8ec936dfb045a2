"""relax.preprocess against TRL's dataset preparation, and its memory on a million rows: one command, tables, and JSON.

    python benchmarks/preprocess.py --tokenizer DIR --pairs FILE --output results.json

Strategy: each side is a process of its own with its imports done, and they take turns on the same rows; after one warm-up
each turn gives one ratio. TRL's time is that of `DPOTrainer`'s own preparation of a data set that is loaded already; relax's
runs from the file of text to the tokenized files, the tokenizer's loading included. The token ids must agree. Memory is the
whole command's, on generated rows and on a tenth of them.
"""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe_machine, versions
from worker import Seconds, Turns, Worker

from relax.cli.command import Group, Parser, run_command
from relax.errors import UserError

WORDS = ("river", "stone", "over", "a", "the", "green", "small", "ship", "sails", "home", "birds", "sing", "rain", "and", "of")
GENERATED_WORDS = 6  # of a generated question, and of each answer


def main() -> None:
    """Parse, measure, show."""
    args = parse_args()
    os.environ.update(RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # one core a side
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": sys.argv,
        "machine": describe_machine(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory(prefix="preprocess-", dir=args.scratch) as directory:
        scratch = Path(directory)
        if args.pairs:
            rows = write_rows(scratch / "rows.jsonl", repeated(args.pairs, args.rows))
            report["speed"] = compare(rows, args, scratch=scratch)
            print(speed_table(report["speed"]), flush=True)
            save(report, args.output)
        if args.memory_rows:
            counts = (args.memory_rows // 10, args.memory_rows)
            report["memory"] = [measure_memory(count, args, scratch=scratch) for count in counts]
            print(memory_table(report["memory"]))
    save(report, args.output)


def parse_args() -> Any:
    parser = Parser(prog="python benchmarks/preprocess.py", description=__doc__.splitlines()[0])
    group = Group(parser, "what is measured")
    group.directory("--tokenizer", "directory of a tokenizer with a chat template (required)")
    group.directory("--pairs", "JSON lines of the primary format, repeated with numbers; none: no comparison")
    group.whole("--rows", 3000, "rows to compare on")
    group.whole("--turns", 5, "counted turns of each side, after one to warm up")
    group.whole("--memory-rows", 1_000_000, "generated rows whose memory to measure, and a tenth of them; 0: none", at_least=0)
    group.whole("--workers", 1, "processes of relax.preprocess where memory is measured")
    group.directory("--scratch", "where files go meanwhile, a few kB a row (default: the system's)")
    group.directory("--output", "JSON file with every turn, the machine and the versions")
    args = parser.parse()
    if not args.tokenizer or not args.tokenizer.is_dir():
        raise UserError(f"--tokenizer {args.tokenizer}: no such directory")
    return args


def repeated(pairs: Path, count: int) -> Iterator[dict[str, Any]]:
    """`count` different rows: those of the file over and over, each with its number before its first question."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for number, row in zip(range(count), itertools.cycle(rows), strict=False):
        sides = {}
        for side in ("chosen", "rejected"):
            first, *others = row[side]
            sides[side] = [{**first, "content": f"{number}: {first['content']}"}, *others]
        yield sides


def generated(count: int) -> Iterator[dict[str, Any]]:
    """`count` different rows of random words."""
    for number in range(count):
        text = " ".join(WORDS[(number * step + place) % len(WORDS)] for place, step in enumerate(range(1, GENERATED_WORDS + 1)))
        question = {"role": "user", "content": f"{number}: {text}?"}
        answers = (f"{text} {number}", f"{number} {text[::-1]}")
        sides = zip(("chosen", "rejected"), answers, strict=True)
        yield {side: [question, {"role": "assistant", "content": answer}] for side, answer in sides}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    with path.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def compare(rows: Path, args: Any, *, scratch: Path) -> dict[str, Any]:
    """Turns of both sides on the same rows."""
    shared = (rows, args.tokenizer, args.turns + 1)
    workers = {
        "relax": Worker("relax", relax_side, *shared, scratch / "relax", log=scratch / "relax.log"),
        "TRL": Worker("TRL", trl_side, *shared, scratch / "trl", log=scratch / "trl.log"),
    }
    turns: list[dict[str, Seconds]] = []
    with workers["relax"], workers["TRL"]:
        for worker in workers.values():
            worker.answer(timeout=600)  # imports are done
        for _ in range(args.turns + 1):
            answers = {name: worker.turn(timeout=1800) for name, worker in workers.items()}
            if answers["relax"]["ids"] != answers["TRL"]["ids"]:
                raise UserError("the two sides gave different token ids")
            turns.append({name: answer["seconds"] for name, answer in answers.items()})
    counted = turns[1:]
    return {
        "rows": args.rows,
        "turns": [{name: [turn[name].wall, turn[name].cpu] for name in turn} for turn in counted],
        "rows_per_s": {name: args.rows / statistics.median(turn[name].wall for turn in counted) for name in workers},
        "rows_per_cpu_s": {name: args.rows / statistics.median(turn[name].cpu for turn in counted) for name in workers},
        "ratio_wall": [turn["TRL"].wall / turn["relax"].wall for turn in counted],
        "ratio_cpu": [turn["TRL"].cpu / turn["relax"].cpu for turn in counted],
    }


def relax_side(turns: Turns, rows: Path, tokenizer: Path, count: int, scratch: Path) -> None:
    """A worker's function: from the file of rows to a tokenized prefix, each turn."""
    import hashlib

    from relax.backend import indexed
    from relax.data.prefix import field_path
    from relax.data.preprocessing import Settings, preprocess
    from relax.preprocess import TEMPLATES

    settings = Settings(
        input=[str(rows)],
        tokenizer_name_or_path=str(tokenizer),
        output_prefix=str(scratch / "pairs"),
        handler_name="PreferencePairHandler",
        map_keys={},
        seq_length=None,
        prompt_type="auto",
        prompt_type_path=TEMPLATES,
        enable_thinking=None,
        workers=1,
    )
    turns.reply("ready")
    for _ in range(count):
        turns.wait()
        start = Seconds.now()
        preprocess(settings, indexed=indexed, progress=lambda done, total: None)
        seconds = start.until_now()
        digest = hashlib.sha256()
        sides = [indexed.open_field(field_path(scratch / "pairs", f"{side}_input_ids")) for side in ("chosen", "rejected")]
        for row in range(len(sides[0])):
            digest.update(str([ids.tolist() for ids in (sides[0][row], sides[1][row])]).encode())
        turns.reply({"seconds": seconds, "ids": digest.hexdigest()})


def trl_side(turns: Turns, rows: Path, tokenizer: Path, count: int, scratch: Path) -> None:
    """A worker's function: DPOTrainer's own preparation of the rows, each turn."""
    import hashlib

    import datasets
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    datasets.disable_caching()  # else every turn but the first would only read
    datasets.disable_progress_bars()
    scratch.mkdir()
    loaded = datasets.load_dataset("json", data_files=str(rows), cache_dir=str(scratch / "cache"), split="train")
    processing = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
    config = DPOConfig(output_dir=str(scratch / "out"), max_length=None, bf16=False, use_cpu=True, report_to=[])
    turns.reply("ready")
    for _ in range(count):
        turns.wait()
        start = Seconds.now()
        prepared = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=processing), loaded, processing, config, "train")
        seconds = start.until_now()
        digest = hashlib.sha256()
        for row in prepared:
            digest.update(str([row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")]).encode())
        turns.reply({"seconds": seconds, "ids": digest.hexdigest()})


def measure_memory(count: int, args: Any, *, scratch: Path) -> dict[str, Any]:
    """The whole command on `count` generated rows: seconds, and the peak memory of its largest process."""
    rows = write_rows(scratch / "generated.jsonl", generated(count))
    flags = {
        "--input": rows,
        "--output-prefix": scratch / "generated",
        "--tokenizer-name-or-path": args.tokenizer,
        "--handler-name": "PreferencePairHandler",
        "--workers": args.workers,
        "--log-interval": max(count // 10, 1),
    }
    command = [sys.executable, "-m", "relax.preprocess", *(str(part) for flag in flags.items() for part in flag)]
    log = scratch / "memory.log"
    start = time.perf_counter()
    with log.open("w") as output:
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), stream) for stream in (1, 2)]
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
    if status:
        raise UserError(f"relax.preprocess failed:\n{log.read_text()[-2000:]}")
    result = {
        "rows": count,
        "file_mib": rows.stat().st_size / 2**20,
        "seconds": time.perf_counter() - start,
        "peak_rss_mib": usage.ru_maxrss / 2**10,
        "written_mib": sum(file.stat().st_size for file in scratch.glob("generated_packed_*")) / 2**20,
    }
    for file in scratch.glob("generated*"):
        file.unlink()
    return result


def speed_table(speed: dict[str, Any]) -> str:
    lines = [
        f"\n{speed['rows']:,} rows, one process and thread a side",
        "| side | rows/s | rows/CPU s |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {name} | {rate:,.0f} | {speed['rows_per_cpu_s'][name]:,.0f} |" for name, rate in speed["rows_per_s"].items()]
    for name, ratios in (("wall clock", speed["ratio_wall"]), ("CPU time", speed["ratio_cpu"])):
        median = statistics.median(ratios)
        lines.append(f"relax over TRL by {name}: {median:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)


def memory_table(results: list[dict[str, Any]]) -> str:
    lines = ["\n| rows | file MiB | written MiB | seconds | peak RSS MiB |", "| ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r['rows']:,} | {r['file_mib']:,.0f} | {r['written_mib']:,.0f} | {r['seconds']:,.0f} | {r['peak_rss_mib']:,.0f} |"
        for r in results
    ]
    few, many = results
    growth = (many["peak_rss_mib"] - few["peak_rss_mib"]) * 2**20 / (many["rows"] - few["rows"])
    return "\n".join([*lines, f"{growth:,.0f} bytes of memory a row"])


def save(report: dict[str, Any], output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_command(main)
