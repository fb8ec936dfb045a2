"""`--dry-run`: what a run would do, without weights, other processes or a GPU: data, packs and memory of each rank."""

import argparse
from typing import Any

import numpy as np

from relax.backend import indexed
from relax.backend.model.families import HFConfig, model_shape, read_hf_config
from relax.cli.objective_flags import build_objective, loss_flag
from relax.cli.settings import (
    check_model,
    check_vocabulary,
    data_options,
    optimizer_options,
    packing,
    parallel_config,
    total_steps,
)
from relax.data import load_pairs
from relax.data.held_out import check_held_out
from relax.data.requirements import check_groups
from relax.metrics import ModelShape, Work
from relax.objectives.base import Head
from relax.packing import StepPlan
from relax.training.batches import Batches
from relax.training.memory import Recompute, stage_bytes, stage_parameters


def describe(args: argparse.Namespace) -> None:
    """Check flags, read and pack the data, print the plan and the memory estimate."""
    objective, config = build_objective(args), read_hf_config(args.hf_checkpoint)
    check_model(args, config)
    split = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    dp_size = args.world_size // split
    packs = packing(args, dp_size=dp_size, hidden_size=config.hidden_size)
    sets: dict[str, Batches] = {}
    sources = {"train": args.prompt_data} if args.prompt_data else {}
    for title, paths in {**sources, **{f"eval {k}".rstrip(): [v] for k, v in args.eval_prompt_data.items()}}.items():
        dataset = load_pairs(
            paths,
            tokenizer_dir=args.hf_checkpoint,
            options=data_options(args, objective=objective),
            cache_dir=args.data_cache_dir,
            num_workers=args.num_workers,
            title=title,
            indexed=indexed,
        )
        check_vocabulary(dataset, args, config)
        check_groups(dataset, objective, flag=loss_flag(objective), indexed=indexed)
        if "train" in sets:
            check_held_out(dataset, sets["train"].dataset, strict=args.strict_data)
        print(dataset.report.table())
        sets[title] = Batches(dataset, packs, args.global_batch_size, args.seed, args.shuffle and title == "train")
    if train := sets.get("train"):
        steps = total_steps(args, train)
        if steps:
            optimizer_options(args, steps)
        size = f"{args.global_batch_size} pairs, {train.steps_per_epoch} an epoch"
        print(f"\n{steps} steps of {size}, {dp_size} data-parallel ranks")
        shape = model_shape(config, head=objective.head)
        print(_packing_table(train, min(steps, train.steps_per_epoch), shape=shape, lm=objective.head == "lm"))
    print("\n" + memory_table(args, config, head=objective.head))


def _packing_table(train: Batches, steps: int, *, shape: ModelShape, lm: bool) -> str:
    """Over the first epoch's steps: micro-batches, tokens, balance and work."""
    counts, fill, balance, tokens, flops = [], [], [], [], []
    for step in range(1, steps + 1):
        _, indices = train.indices(step)
        plan = train.packing.plan(train.dataset.lengths[indices])
        loads = _rank_tokens(train, indices, plan)
        work = train.work(indices, plan, scores_tokens=lm)
        counts.append(len(plan.ranks[0]))
        tokens.append(work.tokens)
        flops.append(work.training_flops(shape))
        fill.append(work.tokens / (len(plan.ranks) * len(plan.ranks[0]) * train.packing.max_tokens))
        balance.append(loads.max() / loads.mean())
    rows: dict[str, Any] = {
        "micro-batches per rank and step": counts,
        "tokens per step": tokens,
        "share of the token budget used": fill,
        "largest rank over the mean, tokens": balance,
        "TFLOP per step": np.array(flops) / 1e12,
    }
    lines = [f"{'':36}{'mean':>12}{'least':>12}{'most':>12}"]
    lines += [f"{name:36}{np.mean(v):12.4g}{np.min(v):12.4g}{np.max(v):12.4g}" for name, v in rows.items()] if steps else []
    return "\n".join(lines)


def _rank_tokens(train: Batches, indices: np.ndarray, plan: StepPlan) -> np.ndarray:
    loads = []
    for rank in plan.ranks:
        groups = np.array([i for micro in rank for i in micro.groups], dtype=np.int64)
        shared = np.array([s for micro in rank for s in micro.shared], dtype=bool)
        loads.append(Work.of(train.dataset.lengths[indices[groups]], shared, scores_tokens=True).tokens)
    return np.array(loads)


def memory_table(args: argparse.Namespace, config: HFConfig, *, head: Head) -> str:
    """Estimated GiB of a rank of the first, of a middle and of the last pipeline stage."""
    layout, last = parallel_config(args), args.pipeline_model_parallel_size - 1
    stages = {"first": 0, "middle": last // 2, "last": last} if last > 1 else {"first": 0, "last": 1} if last else {"": 0}
    columns = {}
    for name, stage in stages.items():
        rows = stage_bytes(
            config,
            layout,
            head=head,
            stage=stage,
            world_size=args.world_size,
            bf16=args.bf16,
            distributed_optimizer=args.use_distributed_optimizer,
            recompute=Recompute(args.recompute_method, args.recompute_num_layers or 0),
            max_tokens=args.max_tokens_per_gpu,
        )
        millions = stage_parameters(config, layout, head=head, stage=stage).total / 1e6
        columns[name] = [millions, *(size / 2**30 for size in (*rows.values(), sum(rows.values())))]
    title = "memory of a rank, GiB" + (f", by its one of {last + 1} pipeline stages" if last else "")
    names = ["(M parameters)", *rows, "sum"]
    lines = [f"{title:56}" + "".join(f"{name:>12}" for name in columns)]
    lines += [
        f"{name:56}" + "".join(f"{c[i]:12.{1 if i == 0 else 2}f}" for c in columns.values()) for i, name in enumerate(names)
    ]
    return "\n".join(lines)
