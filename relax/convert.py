"""`python -m relax.convert`: between Hugging Face directories and Megatron checkpoints, bit for bit, a tensor at a time.

    hf-to-mcore   --hf-checkpoint DIR --save DIR              for --load --finetune and --ref-load, in any parallel layout
    mcore-to-hf   --load DIR --hf-checkpoint DIR --save DIR   for stock transformers
    verify        --hf-checkpoint DIR --load DIR              exit code 0 where every tensor is equal

One process converts a model of any size: it holds one parameter at a time. A reward model keeps its head. Nothing is
overwritten; an output appears under its name once it is whole.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from relax.cli.arguments import build_parser
from relax.cli.command import Group, Parser, run_command
from relax.cli.places import check_apart
from relax.cli.validation import read_model_config
from relax.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"  # as in `relax.backend.checkpoint.files`, whose package loads torch
# What each command must be given.
NEEDED = {
    "hf-to-mcore": ("--hf-checkpoint", "--save"),
    "mcore-to-hf": ("--load", "--hf-checkpoint", "--save"),
    "verify": ("--hf-checkpoint", "--load"),
}


def main() -> None:
    """Parse; convert or compare."""
    args = parse_args()
    from relax.commands.conversion import convert  # megatron-core loads only once the flags are right

    convert(args)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, all that the command needs among them. Raises UserError."""
    args = build_convert_parser().parse(argv)
    given = {f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value is not None and name != "command"}
    needed = NEEDED[args.command]
    for flag in needed:
        if flag not in given:
            raise UserError(f"{args.command} needs {flag}; see --help")
    idle = given - {*needed, "--dtype", *(["--ckpt-step"] if "--load" in needed else [])}
    if idle:
        raise UserError(f"{min(idle)} has no effect on {args.command}: drop it")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("one process converts a model of any size: start the command without torchrun")
    read_model_config(args.hf_checkpoint)
    if args.save:
        _check_new(args.save)
        inputs = [(flag, getattr(args, flag[2:].replace("-", "_"))) for flag in needed if flag != "--save"]
        check_apart(inputs=inputs, outputs=[("--save", args.save)])
    return args


def _check_new(directory: Path) -> None:
    """What an earlier conversion left unfinished is no obstacle: hidden names, and a tracker of what is not there."""
    unfinished = directory.is_dir() and all(path.name.startswith(".") or path.name == TRACKER for path in directory.iterdir())
    if directory.exists() and not unfinished:
        raise UserError(f"--save {directory} is there already: remove it, or choose another directory")


def build_convert_parser() -> Parser:
    """The parser alone. Flags that mean what they mean in training are training's."""
    parser = Parser(
        prog="python -m relax.convert",
        usage="%(prog)s hf-to-mcore|mcore-to-hf|verify [flags]",
        description="Convert between a Hugging Face directory and a Megatron checkpoint, or compare the two. "
        + " ".join(f"{command} needs {', '.join(flags)}." for command, flags in NEEDED.items()),
    )
    parser.add_argument("command", choices=list(NEEDED), metavar="COMMAND", help=", ".join(NEEDED))
    group = Group(parser, "flags")
    group.directory("--hf-checkpoint", "Hugging Face directory; for mcore-to-hf only its config and tokenizer are read")
    group.directory("--load", "Megatron checkpoint: a directory of iterations, or one iteration's own")
    group.shared(build_parser(), "--ckpt-step")
    group.directory("--save", "where the result goes: a new directory")
    group.choice(
        "--dtype",
        ("float32", "bfloat16", "float16"),
        None,
        "dtype of the result, or of the comparison (default: the narrowest that keeps every bit)",
    )
    return parser


if __name__ == "__main__":
    run_command(main)
