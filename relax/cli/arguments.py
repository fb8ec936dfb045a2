"""The command line of `python -m relax.train`: every flag with its group, default, unit and meaning.

Strategy: argparse checks each value by itself, `validation` the values against each other and the files, and `layout_rules`
the parallel layout; defaults that depend on other flags are filled in between. `objective_flags` derives the objectives'
hyper-parameters. Invariants:
- `parse_args` returns values that can work together, or raises `UserError` with the value, the rule and the flag.
- No flag is ignored: one that has no effect in this run (another loss's, W&B's without W&B) is an error.
- A flag `--no-x` stores False in `args.x`, so that code reads `if args.shuffle`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from relax.cli.command import EvalData, Group, Parser, json_object, path_text, string_map
from relax.cli.layout_rules import validate_layout
from relax.cli.objective_flags import add_objective_flags, build_objective, explain, settle_objective
from relax.cli.places import real
from relax.cli.validation import check_combinations, check_files, read_model_config
from relax.errors import UserError
from relax.objectives import OBJECTIVES


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags as a namespace of plain values, directories as `Path`, data paths as strings.

    Dependent defaults are filled in, `eval_prompt_data` maps names to paths (the unnamed set is ""), and `world_size`
    is `--world-size`, else the environment's. Raises UserError.
    """
    args = build_parser().parse(argv)
    if args.explain_loss:
        _explain_and_exit(args)
    check_combinations(args)
    settle_objective(args)
    _fill_defaults(args)
    model_config = read_model_config(args.hf_checkpoint)
    check_files(args)
    settle_layout(args, model_config)
    return args


def _explain_and_exit(args: argparse.Namespace) -> NoReturn:
    if args.loss_type is None:
        raise UserError(f"--explain-loss needs --loss-type: {' or '.join(OBJECTIVES)}")
    settle_objective(args)
    print(explain(build_objective(args)))
    sys.exit(0)


def settle_layout(args: argparse.Namespace, model_config: dict[str, Any]) -> None:
    """Fill in the number of ranks and what follows from it. Raises UserError for a layout that cannot work."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not (world_size.isdecimal() and int(world_size) > 0):
        raise UserError(f"the environment's WORLD_SIZE must be a whole number, at least 1, not {world_size!r}")
    if int(world_size) > 1 and "RANK" not in os.environ and not args.dry_run:
        raise UserError(f"the environment has WORLD_SIZE {world_size} without a RANK: start the ranks by torchrun, or unset it")
    if args.world_size is None:
        args.world_size = int(world_size)
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    validate_layout(args, args.world_size, model_config)


def build_parser() -> Parser:
    """The parser alone, without the rules across flags."""
    parser = Parser(
        prog="python -m relax.train",
        usage="%(prog)s --loss-type dpo|rm --hf-checkpoint DIR --prompt-data PATH... --num-rollout N [flags]",
        description="Train a DPO policy or a reward model on preference pairs, from a Hugging Face checkpoint. "
        "The same command runs on CPU, on one GPU, and under torchrun on many.",
    )
    _add_objective(Group(parser, "objective"))
    _add_checkpoints(Group(parser, "model and checkpoints"))
    _add_data(Group(parser, "data"))
    _add_training(Group(parser, "training"))
    _add_optimizer(Group(parser, "optimizer and schedule"))
    _add_parallelism(Group(parser, "parallelism and memory"))
    _add_logging(Group(parser, "logging"))
    return parser


def _fill_defaults(args: argparse.Namespace) -> None:
    """Defaults that depend on other flags."""

    def default(dest: str, value: Any) -> None:
        if getattr(args, dest) is None:
            setattr(args, dest, value)

    default("lr", OBJECTIVES[args.loss_type].default_lr)
    default("min_lr", 0.0)
    if args.min_lr > args.lr:
        raise UserError(f"--min-lr {args.min_lr:g} must not be above --lr {args.lr:g}")
    default("lr_warmup_iters", 0)
    default("ref_load", args.hf_checkpoint)
    default("wandb_project", "relax")
    default("profile_step_start", 10)
    default("profile_step_end", args.profile_step_start + 2)
    name = real(args.save).name if args.save else f"{args.loss_type}-{time.strftime('%Y%m%d-%H%M%S')}"
    default("exp_name", f"{name}-eval" if args.skip_train else name)  # an evaluation must not touch the run's own log
    default("wandb_name", args.exp_name)


def _add_objective(group: Group) -> None:
    group.choice(
        "--loss-type",
        list(OBJECTIVES),
        None,
        "dpo: a policy by direct preference optimisation; rm: a reward model (required)",
    )
    add_objective_flags(group)
    group.switch("--explain-loss", "print what these flags minimise: formula, source, value at the first step; exit")
    group.choice("--task-type", ["causal_lm"], "causal_lm", "the kind of model; the only value")


def _add_checkpoints(group: Group) -> None:
    group.directory(
        "--hf-checkpoint",
        "Hugging Face directory: config, tokenizer and, if nothing else is loaded, weights (required)",
    )
    group.directory(
        "--ref-load",
        "frozen reference, an HF directory or a Megatron checkpoint; also the policy's start unless --load holds a "
        "complete checkpoint (default: --hf-checkpoint)",
    )
    group.whole("--ref-ckpt-step", None, "iteration of the Megatron checkpoint in --ref-load (default: its latest)")
    group.directory(
        "--load",
        "Megatron checkpoint to resume; if absent, empty or unfinished, a new run starts, so it may equal --save",
    )
    group.whole("--ckpt-step", None, "iteration to take from --load (default: its latest complete one)")
    group.switch("--finetune", "take only the weights from --load and start at step 0")
    group.directory("--save", "where checkpoints go, as iter_0000050 and so on; nothing is saved without it")
    group.whole("--save-interval", None, "steps between checkpoints (default: only at the end)")
    group.switch("--no-save-optim", "save checkpoints without optimizer and scheduler state (resume with --no-load-optim)")
    group.switch("--no-save-rng", "save checkpoints without random number states (resume with --no-load-rng)")
    group.switch("--no-load-optim", "resume with a fresh optimizer and scheduler")
    group.switch("--no-load-rng", "resume with random number states from --seed")
    group.other(
        "--save-hf",
        type=path_text,
        metavar="DIR",
        help="export in Hugging Face format at each save and at the end; {iteration} becomes the step",
    )
    group.switch("--async-save", "write checkpoints in the background while training goes on")
    group.whole("--keep-checkpoints", None, "keep only the newest N checkpoints in --save (default: all)")


def _add_data(group: Group) -> None:
    group.other(
        "--prompt-data",
        nargs="+",
        type=path_text,
        metavar="PATH",
        default=[],
        help="training pairs: JSONL, JSON, Parquet, Arrow or CSV files, directories of them, saved datasets, or tokenized "
        "prefixes (relax.preprocess)",
    )
    group.other(
        "--eval-prompt-data",
        nargs="+",
        type=path_text,
        metavar="[NAME] PATH",
        default={},
        action=EvalData,
        help="held-out pairs, evaluated whole before the first step, at --eval-interval and after the last step; "
        "repeat with a NAME for further sets",
    )
    group.whole(
        "--preference-max-length",
        1024,
        "tokens of a prompt and its longer completion; more cuts the prompt on its left",
    )
    group.whole("--preference-max-completion-length", 512, "tokens of a completion; more is cut on the right")
    group.choice(
        "--sft-oversize-strategy",
        ["keep", "skip", "truncate_left", "truncate_right"],
        "keep",
        "a pair above --max-tokens-per-gpu (two prompts, two completions): alone in its micro-batch, dropped, or cut, "
        "the prompt first (left) or the completions first (right)",
    )
    group.text("--prompt-key", "prompt", "column of the prompt, if rows have one", metavar="COLUMN")
    group.text("--chosen-key", "chosen", "column of the preferred answer", metavar="COLUMN")
    group.text("--rejected-key", "rejected", "column of the other answer", metavar="COLUMN")
    group.text(
        "--pair-id-key",
        None,
        "column that names a pair; a repeated name is then dropped as a duplicate",
        metavar="COLUMN",
    )
    group.json(
        "--conversation-key-map",
        string_map,
        'renames fields and roles of conversations, as in \'{"from": "role", "gpt": "assistant"}\'',
    )
    group.text("--tool-key", "tools", "column of tool definitions for the chat template", metavar="COLUMN")
    group.text("--system-prompt", None, "system message for conversations that have none")
    group.json(
        "--apply-chat-template-kwargs",
        json_object,
        "variables for the chat template, as in '{\"enable_thinking\": false}'; strftime_now is the day on its clock",
    )
    group.switch("--no-chat-template", "take prompt and answers as they are, between BOS and end token: rows templated before")
    group.switch("--no-shuffle", "keep the file's order in every epoch")
    group.switch(
        "--strict-data",
        "stop at the first bad row, message field that the chat template leaves out, or pair of both training and evaluation",
    )
    group.directory(
        "--data-cache-dir", "tokenized data and reference tables, reused by later runs", default=Path(".cache/relax")
    )
    group.whole("--num-workers", min(os.cpu_count() or 1, 8), "processes that tokenize; files of a few thousand rows take one")


def _add_training(group: Group) -> None:
    group.whole("--num-rollout", None, "optimizer steps of the whole run, those before a resume included; this or --num-epoch")
    group.whole("--num-epoch", None, "passes over the data, each of ceil(pairs / batch) steps; this or --num-rollout")
    group.whole("--global-batch-size", 32, "pairs per step over all ranks")
    group.whole("--max-tokens-per-gpu", 8192, "token budget of a micro-batch, as laid out, per context-parallel rank")
    group.whole("--seed", 42, "seed of data order, reward head and random number states", at_least=0, at_most=2**32 - 1)
    group.pair("--bf16", True, "compute in bf16 with fp32 master weights and gradients (default), or all in fp32")
    group.whole("--eval-interval", None, "steps between evaluations (default: only before the first and after the last step)")
    group.switch("--skip-train", "evaluate only")
    group.switch("--dry-run", "check the flags, read and pack the data, print the plan and the memory estimate, and exit")
    group.whole("--world-size", None, "with --dry-run: ranks to plan for (default: the processes that were started)")


def _add_optimizer(group: Group) -> None:
    group.real("--lr", None, "peak learning rate (default: 5e-7 for a policy, 1e-5 for a reward model)")
    group.real("--min-lr", None, "learning rate at the end of the decay (default: 0)")
    group.choice(
        "--lr-decay-style",
        ["constant", "linear", "cosine", "WSD"],
        "cosine",
        "from --lr to --min-lr over the run, after the warmup; WSD stays at --lr and falls over the last tenth",
    )
    group.whole("--lr-warmup-iters", None, "steps of linear warmup from 0 (default: 0)", at_least=0)
    group.real("--lr-warmup-fraction", None, "the warmup as a fraction of all steps instead", below=1)
    group.real("--weight-decay", 0.0, "decoupled weight decay, as in AdamW")
    group.real("--adam-beta1", 0.9, "decay of Adam's mean of gradients", below=1)
    group.real("--adam-beta2", 0.999, "decay of Adam's mean of squared gradients", below=1)
    group.real("--adam-eps", 1e-8, "added to Adam's denominator", above=0)
    group.real("--clip-grad", 1.0, "largest global gradient norm; larger ones are scaled down to it; 0 turns it off")


def _add_parallelism(group: Group) -> None:
    group.choice("--device", ["auto", "cpu", "cuda"], "auto", "where to compute; auto takes a GPU if there is one")
    group.whole("--tensor-model-parallel-size", 1, "ranks that split each weight matrix and the vocabulary")
    group.whole("--pipeline-model-parallel-size", 1, "ranks that split the layers")
    group.whole(
        "--num-layers-per-virtual-pipeline-stage",
        None,
        "layers of one interleaved pipeline chunk (default: no interleaving)",
    )
    group.whole("--context-parallel-size", 1, "ranks that split each row of tokens")
    group.whole("--expert-model-parallel-size", 1, "ranks that split the experts of an MoE model")
    group.whole(
        "--expert-tensor-parallel-size",
        None,
        "ranks that split each expert's weights (default: --tensor-model-parallel-size)",
    )
    group.switch("--sequence-parallel", "split activations outside attention and MLP over the tensor-parallel ranks, too")
    group.switch("--use-distributed-optimizer", "split optimizer state over data-parallel ranks")
    group.switch("--overlap-grad-reduce", "reduce gradients over data-parallel ranks during the backward pass")
    group.choice(
        "--recompute-granularity", ["full", "selective"], None, "recompute layers, or only their attention, in backward"
    )
    group.choice("--recompute-method", ["uniform", "block"], None, "full: all layers in equal units, or only the first few")
    group.whole("--recompute-num-layers", None, "layers in a unit (uniform), or recomputed layers per pipeline stage (block)")
    group.choice("--transformer-impl", ["local"], "local", "whose layers: Megatron's own, the only value")
    group.choice(
        "--attention-backend",
        ["auto", "sdpa", "varlen", "flash"],
        "auto",
        "sdpa: torch's attention, any device; on a GPU, varlen: torch's one call; flash: flash-attn's; auto: the fastest there",
    )
    group.switch("--no-share-prompt", "lay out a prompt twice, once per answer, even where sharing would save time")
    group.real("--moe-aux-loss-coeff", 0.0, "weight of the MoE router's load-balancing loss")
    group.whole("--distributed-timeout-minutes", 10, "minutes after which a rank that waits for another gives up")


def _add_logging(group: Group) -> None:
    group.text(
        "--exp-name",
        None,
        "the run's name in --log-dir (default: the last part of --save, else loss type and time)",
        metavar="NAME",
    )
    group.whole("--log-interval", 1, "steps between console lines where there is no progress bar; the log has every step")
    group.directory(
        "--log-dir", "where NAME.jsonl (one object of metrics per step) and NAME/curves.png go", default=Path("log")
    )
    group.real("--peak-tflops", None, "peak TFLOP/s of one device, for perf/mfu (default: the known or measured peak)", above=0)
    group.switch("--use-wandb", "log to Weights & Biases as well")
    group.text("--wandb-project", None, "W&B project (default: relax)", metavar="NAME")
    group.text("--wandb-name", None, "W&B run name (default: --exp-name)", metavar="NAME")
    group.choice("--wandb-mode", ["online", "offline", "disabled"], None, "W&B mode (default: WANDB_MODE, else online)")
    group.directory("--tensorboard-dir", "log to TensorBoard as well, in this directory")
    group.switch("--profile", "record a torch profiler trace of some steps in --log-dir")
    group.whole("--profile-step-start", None, "first step of the trace (default: 10)")
    group.whole("--profile-step-end", None, "first step after the trace (default: two after its start)")
