"""What `relax.score` does: read the pairs, score them, write a line for every row, print accuracy and margins.

Invariants:
- A row's numbers are those that training's evaluation averages: same data, packing, engine and loss.
- Every row of the input has its line in the output, in order: its scores, or why it has none. Duplicates are scored.
- The output appears under its name once it is whole.
"""

import argparse
import json
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from relax.backend import indexed
from relax.backend.device import is_main_rank, select_device
from relax.backend.engine import Engine
from relax.backend.model.families import read_hf_config
from relax.backend.parallel import agree, from_main_rank, initialize, main_rank_first, shutdown
from relax.cli.objective_flags import build_objective, loss_flag, settle_objective
from relax.cli.settings import check_model, check_vocabulary, data_options, packing, parallel_config
from relax.data import DataReport, GroupDataset, load_pairs
from relax.data.directories import expand_paths
from relax.data.pipeline import read_files
from relax.data.requirements import check_groups
from relax.data.scratch import whole_file
from relax.errors import UserError
from relax.metrics import group_means
from relax.objectives import Objective, RewardModel, with_role
from relax.objectives.base import Head
from relax.reference.fill import fill_table
from relax.reference.table import ReferenceTable
from relax.training.batches import Batches
from relax.training.weight_source import WeightSource

# Usual names of the columns that a flag may name otherwise.
IDS, SUBSETS = ("id", "prompt_id"), ("subset",)


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the input: what the output repeats of it, its subset, and why it was dropped, if it was."""

    facts: dict[str, Any]
    subset: str
    dropped: str | None


def score(args: argparse.Namespace) -> None:
    """Run the command. Raises UserError, on every rank."""
    config = read_hf_config(args.hf_checkpoint)
    check_model(args, config)
    parallel = parallel_config(args)
    device = select_device(args.device)
    initialize(parallel, device=device, seed=args.seed, timeout_minutes=args.distributed_timeout_minutes)
    policy = WeightSource(args.load, args.ckpt_step, "--load") if args.load else WeightSource(args.hf_checkpoint)
    reference = WeightSource(args.ref_load, args.ref_ckpt_step) if args.ref_load else None
    objective = _objective(args, head=policy.head())
    if reference:
        reference.head()  # it can be read: said before the data take their time
    engine = Engine(
        config,
        objective=objective,
        device=device,
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        parallel=parallel,
        attention=args.attention_backend,
    )
    dataset = _read(args, objective)
    check_vocabulary(dataset, args, config)
    check_groups(dataset, objective, flag=loss_flag(objective), indexed=indexed)
    lines = _lines(args, dataset.report)
    batches = Batches(
        dataset=dataset,
        packing=packing(args, dp_size=engine.dp_size, hidden_size=config.hidden_size),
        batch_size=args.global_batch_size,
        seed=args.seed,
        shuffle=False,
    )
    if reference:
        reference.load(engine, seed=args.seed)
        batches.table = ReferenceTable(dataset.hashes, width=dataset.num_completions, path=None)
        fill_table(engine, batches, steps=batches.all_steps, after_each=lambda: None)
    policy.load(engine, seed=args.seed)
    values = _evaluate(engine, batches)
    agree((lambda: _write(args.output, lines, objective, values)) if is_main_rank() else None)
    if is_main_rank():
        print(table([line.subset for line in lines if not line.dropped], objective, values))
    shutdown()


def _objective(args: argparse.Namespace, *, head: Head) -> Objective:
    """The objective whose metrics are the scores."""
    if head == "scalar":
        for flag, given in (("--ref-load", args.ref_load), ("--dpo-beta", args.dpo_beta)):
            if given is not None:
                raise UserError(f"{flag} has no effect: the weights are a reward model's, which is its own measure; drop it")
        return RewardModel()
    policy = {"loss_type": "dpo", "dpo_reference_free": args.ref_load is None}
    settled = argparse.Namespace(**{**vars(args), **policy})
    settle_objective(settled)
    return build_objective(settled)


def _read(args: argparse.Namespace, objective: Objective) -> GroupDataset:
    options = replace(data_options(args, objective=objective), drop_duplicates=False)
    today = from_main_rank(date.today)
    dataset = main_rank_first(
        lambda first: load_pairs(
            args.prompt_data,
            tokenizer_dir=args.hf_checkpoint,
            options=options,
            cache_dir=args.data_cache_dir,
            num_workers=args.num_workers,
            title="score",
            indexed=indexed,
            verify=first,
            today=today,
        )
    )
    unused = {name: rows for name, rows in dataset.report.unused_columns.items() if name != args.subset_key}
    dataset.report = replace(dataset.report, unused_columns=unused)
    if is_main_rank():
        print(dataset.report.table(), flush=True)
    return dataset


def _lines(args: argparse.Namespace, report: DataReport) -> list[Line]:
    """Every row of the input, in order. UserError where no row has the subset column asked for."""
    dropped = {row: code for code, rejections in report.rejected.items() for row in rejections.rows}
    files = expand_paths(args.prompt_data)
    lines = []
    for chunk in read_files(files, indexed=indexed):
        for number, row in zip(chunk.numbers, chunk.rows(), strict=True):
            facts = {"file": str(files[chunk.file]), "row": number} if len(files) > 1 else {"row": number}
            pair_id, subset = _value(row, args.pair_id_key, IDS), _value(row, args.subset_key, SUBSETS)
            facts |= {key: value for key, value in (("id", pair_id), ("subset", subset)) if value is not None}
            code = dropped.get((chunk.file, number))
            lines.append(Line(facts, "" if subset is None else str(subset), code))
    if args.subset_key and not any(line.subset for line in lines):
        raise UserError(f"--subset-key {args.subset_key}: no row has a value there")
    return lines


def _value(row: Any, asked: str | None, usual: tuple[str, ...]) -> Any:
    """The row's value in the column asked for, else in the first of the usual ones that has one."""
    if not isinstance(row, dict):
        return None
    return next((row[name] for name in ((asked,) if asked else usual) if row.get(name) is not None), None)


def _evaluate(engine: Engine, batches: Batches) -> np.ndarray:
    """The objective's metrics of every group, [num_groups, metrics]."""
    quiet = None if is_main_rank() else True  # None: on a terminal
    steps = tqdm(batches.epoch(), total=batches.steps_per_epoch, desc="score", unit="batch", disable=quiet)
    values = np.concatenate([engine.evaluate(batches.batch(indices)) for indices in steps])
    if not np.isfinite(values).all():
        raise UserError("a score is not a finite number: the weights are damaged, or overflow in this dtype (--no-bf16)")
    return values


def _write(output: Path, lines: list[Line], objective: Objective, values: np.ndarray) -> None:
    """One JSON object per line: its facts, and its numbers or why it has none."""
    shown = with_role(objective.metrics, "score", "reference", "margin")
    names, columns = [metric.name for metric in shown], [objective.metrics.index(metric) for metric in shown]
    (strict,) = with_role(objective.metrics, "strict")
    correct = values[:, objective.metrics.index(strict)] == 1
    numbers = iter(zip(values[:, columns].tolist(), correct.tolist(), strict=True))
    try:
        with whole_file(output) as file:
            for line in lines:
                found: dict[str, Any] = {"dropped": line.dropped}
                if not line.dropped:
                    scores, right = next(numbers)
                    found = {**dict(zip(names, scores, strict=True)), "correct": right}
                file.write(json.dumps({**line.facts, **found}) + "\n")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None


def table(subsets: list[str], objective: Objective, values: np.ndarray) -> str:
    """Means over the pairs of each subset, and over all of them."""
    names = [metric.name for metric in with_role(objective.metrics, "margin", "strict", "ties", "accuracy")]
    groups = {name: np.array([subset == name for subset in subsets]) for name in sorted(set(subsets) - {""})}
    groups["all"] = np.ones(len(values), dtype=bool)
    width = max(map(len, groups))
    lines = [f"{'':{width}}{'pairs':>10}" + "".join(f"{name:>20}" for name in names)]
    for group, members in groups.items():
        means = group_means(values[members], [metric.name for metric in objective.metrics], prefix="")
        lines.append(f"{group:{width}}{members.sum():>10,}" + "".join(f"{means[name]:>20.4f}" for name in names))
    return "\n".join(lines)
