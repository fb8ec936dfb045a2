"""`python -m relax.score`: score pairs with a reward model, or with a policy, also against a reference.

The command is an evaluation of `relax.train` that tells of each pair: the same data pipeline, engine and numbers. Which
head the weights have, a reward model's or a language model's, is read from them. Under torchrun it is the same command.
"""

import argparse
from collections.abc import Sequence

from relax.cli.arguments import build_parser, settle_layout
from relax.cli.command import Group, Parser, path, path_text, run_command
from relax.cli.places import check_apart
from relax.cli.validation import check_needs, read_model_config
from relax.errors import UserError


def main() -> None:
    """Parse, score, write, print the table."""
    args = parse_args()
    from relax.commands.scoring import score  # megatron-core loads only once the flags are right

    score(args)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """This command's flags, over training's defaults for all that it does not offer. Raises UserError."""
    args = argparse.Namespace(**{**vars(build_parser().parse([])), **vars(build_score_parser().parse(argv))})
    for flag, value in (
        ("--hf-checkpoint", args.hf_checkpoint),
        ("--prompt-data", args.prompt_data),
        ("--output", args.output),
    ):
        if not value:
            raise UserError(f"{flag} is required; see --help")
    check_needs(args)
    if args.output.exists():
        raise UserError(f"--output {args.output} exists: remove it, or choose another file")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: {args.output.parent} is not a directory")
    named = [("--hf-checkpoint", args.hf_checkpoint), ("--load", args.load), ("--ref-load", args.ref_load)]
    inputs = [*((flag, path) for flag, path in named if path), *(("--prompt-data", path) for path in args.prompt_data)]
    check_apart(inputs=inputs, outputs=[("--output", args.output), ("--data-cache-dir", args.data_cache_dir)])
    settle_layout(args, read_model_config(args.hf_checkpoint))
    return args


def build_score_parser() -> Parser:
    """The parser alone. Flags that mean what they mean in training are training's."""
    parser = Parser(
        prog="python -m relax.score",
        usage="%(prog)s --hf-checkpoint DIR [--load DIR] [--ref-load DIR] --prompt-data PATH... --output FILE [flags]",
        description="Score preference pairs: with a reward model, or with a policy's log-probabilities, also against a "
        "reference. Writes one JSON line per row and prints accuracy and margins.",
    )
    training = build_parser()
    model = Group(parser, "model")
    model.shared(training, "--hf-checkpoint")
    model.directory("--load", "Megatron checkpoint whose weights to score with, instead of --hf-checkpoint's")
    model.shared(training, "--ckpt-step")
    model.directory(
        "--ref-load",
        "a policy's reference, an HF directory or a Megatron checkpoint: rewards are then beta x (policy - reference); "
        "without it, beta x the policy's log-probabilities",
    )
    model.shared(training, "--ref-ckpt-step", "--dpo-beta")
    data = Group(parser, "data")
    data.other(
        "--prompt-data",
        nargs="+",
        type=path_text,
        metavar="PATH",
        default=[],
        help="pairs to score: whatever training reads (required)",
    )
    data.other("--output", type=path, metavar="FILE", help="where the JSON lines go, one per row; a new file (required)")
    data.text("--subset-key", None, "column that divides the table (default: subset, where rows have it)", metavar="COLUMN")
    data.text(
        "--pair-id-key", None, "column that names a pair (default: id or prompt_id, where rows have it)", metavar="COLUMN"
    )
    data.shared(
        training, "--preference-max-length", "--preference-max-completion-length", "--sft-oversize-strategy", "--prompt-key",
        "--chosen-key", "--rejected-key", "--conversation-key-map", "--tool-key", "--system-prompt",
        "--apply-chat-template-kwargs", "--no-chat-template", "--strict-data", "--data-cache-dir", "--num-workers",
    )  # fmt: skip
    computing = Group(parser, "computing")
    computing.shared(
        training, "--global-batch-size", "--max-tokens-per-gpu", "--no-share-prompt", "--bf16", "--device",
        "--attention-backend", "--transformer-impl", "--tensor-model-parallel-size", "--sequence-parallel",
        "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
        "--expert-tensor-parallel-size", "--distributed-timeout-minutes",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    run_command(main)
