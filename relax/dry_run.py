"""`--dry-run`: what a run would do, without weights, other processes or a GPU: data, packs and memory of each rank."""

import argparse
from typing import Any

import numpy as np

from relax.backend.model import HFConfig, model_shape, read_hf_config
from relax.batches import Batches
from relax.data import load_pairs
from relax.loss_flags import build_loss
from relax.metrics import ModelShape, Work
from relax.packing import StepPlan
from relax.settings import check_model, check_vocabulary, data_options, optimizer_options, packing, total_steps


def describe(args: argparse.Namespace) -> None:
    """Check flags, read and pack the data, print the plan and the memory estimate."""
    loss, config = build_loss(args), read_hf_config(args.hf_checkpoint)
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
            options=data_options(args, whole_render=loss.head == "scalar"),
            cache_dir=args.data_cache_dir,
            num_workers=args.num_workers,
            title=title,
        )
        check_vocabulary(dataset, args, config)
        print(dataset.report.table())
        sets[title] = Batches(dataset, packs, args.global_batch_size, args.seed, args.shuffle and title == "train")
    shape = model_shape(config, head=loss.head)
    if train := sets.get("train"):
        steps = total_steps(args, train)
        if steps:
            optimizer_options(args, steps)
        size = f"{args.global_batch_size} pairs, {train.steps_per_epoch} an epoch"
        print(f"\n{steps} steps of {size}, {dp_size} data-parallel ranks")
        print(_packing_table(train, min(steps, train.steps_per_epoch), shape=shape, lm=loss.head == "lm"))
    print("\n" + memory_table(args, config, shape, dp_size=dp_size))


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
        pairs = np.array([i for micro in rank for i in micro.pairs], dtype=np.int64)
        shared = np.array([s for micro in rank for s in micro.shared], dtype=bool)
        loads.append(Work.of(train.dataset.lengths[indices[pairs]], shared, scores_tokens=True).tokens)
    return np.array(loads)


def memory_table(args: argparse.Namespace, config: HFConfig, shape: ModelShape, *, dp_size: int) -> str:
    """Estimated GiB of the fullest rank: exact for weights, gradients and optimizer, an upper estimate for activations."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    embeddings = config.vocab_size * config.hidden_size
    outer = embeddings * (1 if config.tie_word_embeddings or shape.head_width == 1 or pipeline > 1 else 2)
    parameters = (shape.num_layers / pipeline * shape.layer_parameters + outer) / tensor
    width = 2 if args.bf16 else 4
    master = 4 if args.bf16 else 0
    shards = dp_size * args.context_parallel_size if args.use_distributed_optimizer else 1
    rows = {
        "parameters": parameters * width,
        "gradients, fp32": parameters * 4,
        "master weights and Adam moments, fp32": parameters * (master + 8) / shards,
        "activations of one micro-batch": _activation_bytes(args, config, shape, width=width),
    }
    lines = [f"{'memory of the fullest rank':40}{'GiB':>10}", f"{'(M parameters)':40}{parameters / 1e6:10.1f}"]
    lines += [f"{name:40}{size / 2**30:10.2f}" for name, size in rows.items()]
    return "\n".join([*lines, f"{'sum':40}{sum(rows.values()) / 2**30:10.2f}"])


def _activation_bytes(args: argparse.Namespace, config: HFConfig, shape: ModelShape, *, width: int) -> float:
    """What one layer keeps for its backward, per token: norms' inputs and outputs, query, key, value, attention's output, the
    gated MLP's inner values; with full recompute only each layer's input."""
    hidden, inner = config.hidden_size, config.intermediate_size
    key_value = shape.attention_width * config.num_key_value_heads // config.num_attention_heads
    layer = 6 * hidden + 3 * shape.attention_width + 3 * key_value + 4 * inner
    if args.recompute_granularity == "full":
        layer = hidden
    layers = shape.num_layers  # 1F1B keeps as many micro-batches as there are stages after this one: one model's worth
    return float(layers * layer * width * args.max_tokens_per_gpu / args.tensor_model_parallel_size)
