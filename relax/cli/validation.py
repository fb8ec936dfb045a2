"""Rules across flags and files: what a single value cannot show. Every message names the flags and what to change.

Strategy: `check_combinations` sees the flags as given (None: not given), `check_files` the disk; `relax.cli.layout_rules`
has the parallel layouts. Neither needs torch or reads a weight. Invariant: a flag that would have no effect is refused,
and so is one that would destroy something (a fine-tuning run over its own starting point; `relax.cli.places` has the rest).
"""

import argparse
import glob
import json
import os
from pathlib import Path
from typing import Any

from relax.cli.places import ITERATION, Place, check_apart, real
from relax.errors import UserError

# A flag, the one without which it has no effect, and why.
NEEDS = (
    ("--ref-ckpt-step", "--ref-load", "it picks an iteration of that checkpoint"),
    ("--ckpt-step", "--load", "it picks an iteration of that checkpoint"),
    ("--finetune", "--load", "it takes the weights from there"),
    ("--no-load-optim", "--load", "it says what to leave out of that checkpoint"),
    ("--no-load-rng", "--load", "it says what to leave out of that checkpoint"),
    ("--save-interval", "--save", "nothing is saved otherwise"),
    ("--no-save-optim", "--save", "nothing is saved otherwise"),
    ("--no-save-rng", "--save", "nothing is saved otherwise"),
    ("--async-save", "--save", "nothing is saved otherwise"),
    ("--keep-checkpoints", "--save", "nothing is saved otherwise"),
    ("--eval-interval", "--eval-prompt-data", "there is nothing to evaluate otherwise"),
    ("--skip-train", "--eval-prompt-data", "there is nothing to evaluate otherwise"),
    ("--world-size", "--dry-run", "it plans for a machine you are not on; torchrun sets the ranks of a run"),
    ("--recompute-method", "--recompute-granularity", "nothing is recomputed otherwise"),
    ("--recompute-num-layers", "--recompute-granularity", "nothing is recomputed otherwise"),
    ("--wandb-project", "--use-wandb", "nothing goes to W&B otherwise"),
    ("--wandb-name", "--use-wandb", "nothing goes to W&B otherwise"),
    ("--wandb-mode", "--use-wandb", "nothing goes to W&B otherwise"),
    ("--profile-step-start", "--profile", "nothing is profiled otherwise"),
    ("--profile-step-end", "--profile", "nothing is profiled otherwise"),
)


def check_combinations(args: argparse.Namespace) -> None:
    """Missing and contradicting flags, before dependent defaults are filled in. Raises UserError."""
    for flag in ("--loss-type", "--hf-checkpoint"):
        _require(_given(args, flag), f"{flag} is required; see --help")
    check_needs(args)
    _check_amounts(args)
    _check_recompute(args)
    if args.exp_name is not None:
        plain = args.exp_name not in ("", ".", "..") and not {"/", "\0"} & set(args.exp_name)
        plain = plain and len(os.fsencode(args.exp_name)) <= 200
        _require(plain, f"--exp-name {args.exp_name!r} must be a plain name: it becomes a file name in --log-dir")


def check_needs(args: argparse.Namespace) -> None:
    """Refuse a flag without the one that gives it an effect. Raises UserError."""
    for flag, needed, why in NEEDS:
        _require(not _given(args, flag) or _given(args, needed), f"{flag} needs {needed}: {why}")


def _check_amounts(args: argparse.Namespace) -> None:
    """How long, how much, how fast: limits of steps, tokens and schedule."""
    both = args.num_rollout is not None and args.num_epoch is not None
    _require(not both, "give --num-rollout (steps) or --num-epoch (passes over the data), not both")
    if not args.skip_train:
        some = args.num_rollout is not None or args.num_epoch is not None
        _require(some, "give --num-rollout (steps) or --num-epoch (passes over the data), or --skip-train to evaluate only")
        _require(args.prompt_data, "--prompt-data is required, or --skip-train to evaluate only")
    length, completion = args.preference_max_length, args.preference_max_completion_length
    _require(
        completion < length,
        f"--preference-max-completion-length {completion} must be below --preference-max-length {length}, which holds "
        "the prompt too",
    )
    warmup, fraction = args.lr_warmup_iters, args.lr_warmup_fraction
    _require(warmup is None or fraction is None, "give --lr-warmup-iters or --lr-warmup-fraction, not both")
    steps = args.num_rollout
    too_long = warmup is not None and steps is not None and warmup >= steps
    _require(
        not too_long,
        f"--lr-warmup-iters {warmup} must be below --num-rollout {steps}: the peak --lr would not be reached",
    )
    idle = args.lr_decay_style == "constant" and args.min_lr is not None
    _require(not idle, "--min-lr has no effect with --lr-decay-style constant")
    if args.profile:
        start = 10 if args.profile_step_start is None else args.profile_step_start
        end = start + 2 if args.profile_step_end is None else args.profile_step_end
        _require(start < end, f"--profile-step-start {start} must be below --profile-step-end {end}")
        late = steps is not None and start > steps
        _require(not late, f"--profile-step-start {start} is after the last step, --num-rollout {steps}")


def _check_recompute(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full":
        complete = args.recompute_method is not None and args.recompute_num_layers is not None
        advice = "for example --recompute-method uniform --recompute-num-layers 1"
        _require(complete, f"--recompute-granularity full needs --recompute-method and --recompute-num-layers, {advice}")
    if args.recompute_granularity == "selective":
        for flag in ("--recompute-method", "--recompute-num-layers"):
            _require(not _given(args, flag), f"{flag} has no effect with --recompute-granularity selective")


def check_files(args: argparse.Namespace) -> None:
    """What must exist does, what will be written can be, nothing goes over its own source. Raises UserError."""
    if args.ref_load != args.hf_checkpoint:
        _check_reference(args.ref_load, args.ref_ckpt_step)
    for flag, paths in (("--prompt-data", args.prompt_data), ("--eval-prompt-data", args.eval_prompt_data.values())):
        for path in paths:
            _check_data(flag, path)
    if args.load is not None:
        _require(not args.load.exists() or args.load.is_dir(), f"--load {args.load} is not a directory")
        _require(not args.finetune or _is_megatron(args.load), f"--finetune: --load {args.load} holds no Megatron checkpoint")
        _check_iteration("--ckpt-step", args.ckpt_step, args.load)
    if args.save is not None and args.finetune:
        same = real(args.save) == real(args.load)
        _require(not same, "--finetune starts a new run, so --save must be another directory than --load")
    if args.save is not None and not args.skip_train:
        _check_unused(args)
    if args.save_hf is not None:
        rest = args.save_hf.replace(ITERATION, "")
        _require("{" not in rest and "}" not in rest, f"--save-hf {args.save_hf}: {ITERATION} is the only placeholder")
    for flag in ("--save", "--save-hf", "--log-dir", "--data-cache-dir", "--tensorboard-dir"):
        path = getattr(args, _dest(flag))
        if path is not None and not (flag == "--save" and args.skip_train):
            _check_writable(flag, Path(path))
    _check_places(args)


def _check_places(args: argparse.Namespace) -> None:
    """A run may save where it loads from, and keep TensorBoard's log within its own; nothing else shares a place."""
    inputs: list[Place] = [("--hf-checkpoint", args.hf_checkpoint), ("--ref-load", args.ref_load)]
    inputs += [("--prompt-data", path) for path in args.prompt_data]
    inputs += [("--eval-prompt-data", path) for path in args.eval_prompt_data.values()]
    saves = args.save is not None and not args.skip_train
    if args.load is not None and not (saves and real(args.load) == real(args.save)):
        inputs.append(("--load", args.load))
    outputs: list[Place] = [("--save", args.save)] if saves else []
    outputs += [("--save-hf", args.save_hf)] if args.save_hf is not None else []
    outputs += [("--log-dir", args.log_dir), ("--data-cache-dir", args.data_cache_dir)]
    if args.tensorboard_dir is not None and not real(args.tensorboard_dir).is_relative_to(real(args.log_dir)):
        outputs.append(("--tensorboard-dir", args.tensorboard_dir))
    check_apart(inputs=inputs, outputs=outputs)


def _check_unused(args: argparse.Namespace) -> None:
    """A run may add to the checkpoints that it resumes from, never to another run's."""
    resumes = args.load is not None and real(args.load) == real(args.save)
    steps = _iterations(args.save)
    _require(
        resumes or not steps,
        f"--save {args.save} already holds checkpoints, the latest of step {max(steps, default=0)}: --load {args.save} resumes "
        "them; for a new run choose another directory",
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """The HF `config.json` of a directory as plain JSON. Raises UserError when it is not there or not a JSON object."""
    advice = "give a local directory with config.json, the tokenizer and the weights (`hf download` makes one)"
    _require(directory.is_dir(), f"--hf-checkpoint {directory} is not a directory: {advice}")
    file = directory / "config.json"
    _require(file.is_file(), f"--hf-checkpoint {directory} has no config.json: {advice}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--hf-checkpoint: cannot read {file}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--hf-checkpoint: {file} must hold a JSON object, not {type(config).__name__}")
    return config


def _check_reference(path: Path, step: int | None) -> None:
    _require(path.is_dir(), f"--ref-load {path} is not a directory")
    hugging_face = (path / "config.json").is_file()
    known = hugging_face or _is_megatron(path)
    _require(known, f"--ref-load {path} is neither an HF directory (config.json) nor a Megatron checkpoint (iter_*)")
    if hugging_face:
        _require(step is None, f"--ref-ckpt-step {step} picks a Megatron iteration, but --ref-load {path} is an HF directory")
    _check_iteration("--ref-ckpt-step", step, path)


def _check_iteration(flag: str, step: int | None, checkpoint: Path) -> None:
    if step is not None and not (checkpoint / f"iter_{step:07d}").is_dir():
        found = _iterations(checkpoint)
        raise UserError(f"{flag} {step}: {checkpoint} holds {f'iterations {found}' if found else 'no iteration'}")


def _iterations(checkpoint: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoint.glob("iter_*") if path.name[5:].isdecimal())


def _is_megatron(path: Path) -> bool:
    """A directory of iterations, or one iteration's own."""
    return (path / "metadata.json").is_file() or (path / "release").is_dir() or any(path.glob("iter_*"))


def _check_data(flag: str, path: str) -> None:
    tokenized = [str(file) for file in Path(path).parent.glob(f"{glob.escape(Path(path).name)}_packed_*")]
    _require(Path(path).exists() or tokenized, f"{flag} {path} does not exist")
    readable = all(os.access(file, os.R_OK) for file in tokenized or [path])
    _require(readable, f"{flag} {path} is not readable")


def _check_writable(flag: str, path: Path) -> None:
    """A directory that exists or can be made, found without making it."""
    nearest = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    where = "it" if nearest == path.absolute() else str(nearest)
    _require(nearest.is_dir(), f"{flag} {path} cannot be a directory: {where} is a file")
    _require(os.access(nearest, os.W_OK | os.X_OK), f"{flag} {path} is not writable: no permission to write in {where}")


def _dest(flag: str) -> str:
    return flag.removeprefix("--no-").removeprefix("--").replace("-", "_")


def _given(args: argparse.Namespace, flag: str) -> bool:
    value = getattr(args, _dest(flag))
    return value is False if flag.startswith("--no-") else value is not None and value is not False and value != {}


def _require(holds: object, message: str) -> None:
    if not holds:
        raise UserError(message)
