"""What a change that is not about numbers must leave alone: `python -m tests.golden record FILE`, then `compare FILE`.

For every family, as a DPO policy and as a reward model, on one rank and on two: 20 steps with two evaluations and an export.
`record` keeps each log without `perf/*`, to the last digit, and the SHA-256 of the exported weights; `compare` runs all again
and names what differs. FILE is of one machine: another CPU rounds otherwise.
"""

import argparse
import hashlib
import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.command import Flags, Server, Workplace, timeless, write_pairs
from tests.models import FAMILIES, save_tiny

OBJECTIVES: tuple[Flags, ...] = ({"loss_type": "dpo"}, {"loss_type": "rm"})
DENSE: tuple[Flags, ...] = ({"use_distributed_optimizer": True}, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
EXPERTS: tuple[Flags, ...] = ({"expert_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2})


def cases() -> Iterator[tuple[str, str, int, Flags]]:
    """(name, family, ranks, flags) of each run; fp32 on one rank, bf16 on two."""
    for family in FAMILIES:
        for objective, layout in zip(OBJECTIVES, EXPERTS if family == "qwen3_moe" else DENSE, strict=True):
            name = f"{family}-{objective['loss_type']}"
            yield f"{name}-1", family, 1, {**objective, "no_bf16": True}
            yield f"{name}-2", family, 2, {**objective, **layout, "bf16": True}


def run(place: Workplace, name: str, ranks: int, flags: Flags) -> dict[str, Any]:
    """The run's log and weights, as `record` keeps them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [
        place.start(
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}, exp_name=name, save_hf=f"out/{name}", **flags
        )
        for rank in range(ranks)
    ]
    for ended in [process.wait() for process in processes]:
        if ended.code:
            sys.exit(f"{name} ended with {ended.code}:\n{ended.err[-3000:]}")
    weights = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(place.path(f"out/{name}").glob("*.safetensors"))))
    return {"weights": weights.hexdigest(), "log": [json.dumps(line) for line in timeless(place.log(name))]}


def run_all(directory: Path) -> dict[str, Any]:
    """Every case, by name."""
    for family in FAMILIES:
        save_tiny(directory / family, family)
    write_pairs(directory / "train.jsonl", 61)
    write_pairs(directory / "eval.jsonl", 5, seed=1)
    shared: Flags = {
        "prompt_data": "train.jsonl",
        "eval_prompt_data": "eval.jsonl",
        "num_rollout": 20,
        "global_batch_size": 7,
        "max_tokens_per_gpu": 512,
        "preference_max_length": 128,
        "preference_max_completion_length": 64,
        "lr": 1e-3,
        "device": "cpu",
        "peak_tflops": 1,
        "log_interval": 100,
    }
    results = {}
    with Server(directory / "jobs") as server:
        for name, family, ranks, flags in cases():
            place = Workplace(server=server, directory=directory, flags={**shared, "hf_checkpoint": family})
            results[name] = run(place, name, ranks, flags)
            print(f"{name}: weights {results[name]['weights'][:16]}", flush=True)
    return results


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each run that is not as it was."""
    for name in before | now:
        if name not in before or name not in now:
            yield f"{name}: only {'now' if name in now else 'before'}"
        elif before[name] != now[name]:
            pairs = zip(before[name]["log"], now[name]["log"], strict=False)
            at = next((f"\n  before {was}\n  now    {line}" for was, line in pairs if was != line), " in its weights alone")
            yield f"{name} differs{at}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    before = json.loads(args.file.read_text()) if args.what == "compare" else {}
    with tempfile.TemporaryDirectory() as directory:
        now = run_all(Path(directory))
    if args.what == "record":
        args.file.write_text(json.dumps(now, indent=1) + "\n")
        return
    found = list(differences(before, now))
    print("\n".join(found) or f"all {len(now)} runs are as they were")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
