"""`python -m relax.preprocess`: tokenize a data set once, into indexed files that training reads.

A configuration is a YAML file whose keys are this command's flags. Strategy: its values go through the same parser, so
that a rule holds wherever a value comes from; a flag on the command line wins.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from relax.cli.command import STOPS, Group, Parser, ignore_stops, path, path_text, run_command, string_map
from relax.cli.places import check_apart
from relax.errors import UserError

REQUIRED = ("input", "tokenizer_name_or_path", "output_prefix", "handler_name")
TEMPLATES = Path(__file__).parents[1] / "configs" / "model" / "templates.json"
THINKING = {"true": True, "false": False, "none": None}


def main() -> None:
    """Parse, tokenize, write, report."""
    args = parse_args()
    from relax.backend import indexed  # torch and megatron-core load only once the settings are right
    from relax.data.preprocessing import Settings, preprocess

    for kind in STOPS:
        signal.signal(kind, _stop)
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    report = preprocess(settings, indexed=indexed, progress=Progress(args.log_interval))
    print(report.table())
    print(f"{args.output_prefix}: {report.rows_kept:,} rows")


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave nothing behind, whatever comes while that is cleared away."""
    ignore_stops()
    sys.exit(128 + number)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings of configuration and flags together. Raises UserError."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    config = parser.parse(argv).config
    args = parser.parse([*_yaml_flags(parser, config), *argv])
    missing = [key for key in REQUIRED if not getattr(args, key)]
    if missing:
        raise UserError(f"{config or 'without --config'}: {', '.join(missing)} must be given; see --help for all keys")
    if not Path(args.tokenizer_name_or_path).is_dir():
        raise UserError(f"tokenizer_name_or_path {args.tokenizer_name_or_path}: no such directory")
    inputs = [*(("input", path) for path in args.input), ("tokenizer_name_or_path", args.tokenizer_name_or_path)]
    check_apart(inputs=inputs, outputs=[("output_prefix", f"{args.output_prefix}_packed_")])
    args.enable_thinking = THINKING[args.enable_thinking]
    return args


def build_parser() -> Parser:
    """Every key of a configuration, as a flag."""
    parser = Parser(
        prog="python -m relax.preprocess",
        usage="%(prog)s --config configs/datasets/NAME.yaml [--key value ...]",
        description="Tokenize preference pairs or instructions once, into Megatron's indexed files. Every flag but --config is "
        "a key of the YAML file too, with underscores for dashes; a flag wins.",
    )
    parser.add_argument("--config", type=path, metavar="FILE", help="YAML file of the keys below")
    group = Group(parser, "rows")
    group.other(
        "--input",
        nargs="+",
        type=path_text,
        metavar="PATH",
        help="data files, directories of them, or saved datasets (required)",
    )
    group.text("--handler-name", None, "how rows are read, such as PreferencePairHandler (required)", metavar="NAME")
    group.json("--map-keys", string_map, 'canonical name -> column, such as {"prompt": "question"}; "" disables a name')
    group.whole("--seq-length", None, "drop and count rows with a side of more tokens (default: no limit)", at_least=2)
    group = Group(parser, "tokens")
    group.other("--tokenizer-name-or-path", type=path_text, metavar="DIR", help="directory of the tokenizer (required)")
    group.choice("--tokenizer-type", ["PretrainedFromHF", "HuggingFaceTokenizer"], "PretrainedFromHF", "two names of one kind")
    group.text(
        "--prompt-type", "auto", "chat template: auto is the tokenizer's own, none leaves texts as they are, others by name",
        metavar="NAME",
    )  # fmt: skip
    group.other(
        "--prompt-type-path",
        type=path,
        default=TEMPLATES,
        metavar="FILE",
        help="named templates (default: configs/model/templates.json)",
    )
    group.choice("--enable-thinking", list(THINKING), "none", "for templates that read it; none leaves it out")
    group = Group(parser, "output")
    group.other(
        "--output-prefix",
        type=path_text,
        metavar="PREFIX",
        help="files are named PREFIX_packed_FIELD_document.{bin,idx} (required)",
    )
    group.whole("--workers", 1, "processes that tokenize; files of a few thousand rows take one")
    group.whole("--log-interval", 1000, "rows between two lines of progress")
    return parser


def _yaml_flags(parser: Parser, config: Path | None) -> list[str]:
    """The configuration as flags, tried by the parser. Raises UserError naming the file."""
    if config is None:
        return []
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {config}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {config}: must hold keys and values, as configs/datasets/*.yaml do")
    known = [name for name in vars(parser.parse([])) if name != "config"]
    flags: list[str] = []
    for key, value in content.items():
        if key not in known:
            raise UserError(f"--config {config}: unknown key {key!r}; there are: {', '.join(known)}")
        if value is not None:
            flags += _flag(key, value)
    try:
        parser.parse(flags)
    except UserError as error:
        raise UserError(f"--config {config}: {error}") from None
    return flags


def _flag(key: str, value: Any) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={str(value).lower() if isinstance(value, bool) else value}"]


class Progress:
    """Prints a line each time another `interval` rows are done."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._shown = 0
        self._start = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        if done // self._interval > self._shown:
            self._shown = done // self._interval
            rate = done / max(time.perf_counter() - self._start, 1e-9)
            print(f"{done:,} of {total:,} rows, {rate:,.0f} rows/s", flush=True)


if __name__ == "__main__":
    run_command(main)
