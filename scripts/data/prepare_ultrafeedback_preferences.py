"""A fixed subset of UltraFeedback's preference pairs, as training and evaluation JSONL and Parquet with a manifest.

Strategy: rows stream from the pinned revision on the Hugging Face hub, or from a local copy. Of each split the valid row
of each `prompt_id`'s first occurrence competes, and those with the smallest keys SHA-256(namespace + prompt_id) win.

Invariants:
- The same rows give the same bytes, wherever they come from.
- No `prompt_id` is in both subsets.
- Every row that is refused is in the manifest under a reason code, whatever the subset's size.
- Memory holds the subset, not the source.
"""

import argparse
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relax.cli.command import Parser, number, run_command
from relax.data.rows import Row, RowRejected
from relax.data.sources import KINDS, data_kind, is_saved_dataset, read_chunks
from relax.errors import UserError

DATASET = "HuggingFaceH4/ultrafeedback_binarized"
REVISION = "3949bf5f8c17c394422ccfab0c31ea9c20bdeb85"
NAMESPACE = "task31-ultrafeedback-v1:"
SPLITS = {"train": "train_prefs", "eval": "test_prefs"}

_MESSAGES = pa.list_(pa.struct({"content": pa.string(), "role": pa.string()}))
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "chosen": _MESSAGES,
        "rejected": _MESSAGES,
        "metadata": pa.struct({"source_split": pa.string(), "score_chosen": pa.float64(), "score_rejected": pa.float64()}),
    }
)


def order_key(prompt_id: str) -> tuple[str, str]:
    """Where a prompt stands in the fixed order: SHA-256 in hex, ties by id."""
    return hashlib.sha256(f"{NAMESPACE}{prompt_id}".encode()).hexdigest(), prompt_id


def check(row: Row) -> None:
    """Raise `RowRejected` unless both sides are message lists with one history and two different last answers."""
    for side in ("chosen", "rejected"):
        messages = row.get(side)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise RowRejected("schema", f"{side} is not a list of messages with role and content")
        if messages[-1]["role"] != "assistant":
            raise RowRejected("schema", f"{side} does not end with the assistant")
    if row["chosen"][:-1] != row["rejected"][:-1]:
        raise RowRejected("prompt_mismatch", "chosen and rejected have different histories")
    if row["chosen"] == row["rejected"]:
        raise RowRejected("identical", "chosen and rejected are equal")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def valid_rows(rows: Iterable[Any], *, split: str, taken: Collection[str], rejections: list[Row]) -> Iterator[Row]:
    """Output rows of the valid first occurrences, in source order; `rejections` gets what was wrong with the others."""
    seen: set[str] = set()
    for index, row in enumerate(rows):
        prompt_id = row.get("prompt_id") if isinstance(row, dict) else None
        try:
            if not isinstance(prompt_id, str) or not prompt_id:
                raise RowRejected("schema", "no prompt_id")
            if prompt_id in seen:
                raise RowRejected("duplicate", "the prompt_id came before; its first occurrence counts")
            seen.add(prompt_id)
            if prompt_id in taken:
                raise RowRejected("duplicate", "the prompt_id is in the training subset")
            check(row)
        except RowRejected as rejection:
            rejections.append(
                {"source_index": index, "prompt_id": prompt_id, "code": rejection.code, "reason": rejection.detail}
            )
            continue
        scores = {name: row.get(name) for name in ("score_chosen", "score_rejected")}
        yield {
            "prompt_id": prompt_id,
            **{side: [_plain(message) for message in row[side]] for side in ("chosen", "rejected")},
            "metadata": {"source_split": split, **scores},
        }


def _plain(message: Row) -> Row:
    return {"content": message["content"], "role": message["role"]}


def select(
    rows: Iterable[Any], *, split: str, count: int, flag: str, taken: Collection[str] = ()
) -> tuple[list[Row], list[Row]]:
    """(the first `count` valid rows in the fixed order, all rejections). Raises `UserError` when there are too few."""
    rejections: list[Row] = []
    valid = valid_rows(rows, split=split, taken=taken, rejections=rejections)
    chosen = heapq.nsmallest(count, valid, key=lambda row: order_key(row["prompt_id"]))
    if len(chosen) < count:
        raise UserError(
            f"{split} has {len(chosen)} valid rows and {len(rejections)} others, but {flag} asks for {count}: ask for less."
        )
    return chosen, rejections


def hub_rows(split: str) -> Iterator[Row]:
    """The rows of a split at the pinned revision. Raises `UserError` when the hub cannot give them."""
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATASET, revision=REVISION, split=split)
    except Exception as error:  # whatever the network, the hub's client or the builder raises
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{DATASET} cannot be read from the Hugging Face hub: {reason}. Where there is a copy of it on disk (revision "
            f"{REVISION}), give its directory or files with --source."
        ) from error
    yield from dataset


def local_files(sources: Iterable[Path], *, split: str) -> list[Path]:
    """The files of a split: those with its name in theirs, or its directory in a saved dataset. Raises `UserError`."""
    found: list[Path] = []
    for source in sources:
        if not source.exists():
            raise UserError(f"--source {source}: no such file or directory")
        if is_saved_dataset(source / split):
            found.append(source / split)
        else:
            files = sorted(source.rglob("*")) if source.is_dir() else [source]
            found += [file for file in files if file.is_file() and data_kind(file) and split in file.name]
    if not found:
        raise UserError(f"--source: no file of the split {split}: its name must be in the file's ({KINDS})")
    return found


def local_rows(files: Iterable[Path]) -> Iterator[Any]:
    """The rows of local files, in order."""
    return (row for file in files for chunk in read_chunks(file, file=0) for row in chunk.rows())


def write_subset(directory: Path, name: str, rows: list[Row]) -> Row:
    """Write both files; returns their manifest entry."""
    lines = (json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n" for row in rows)
    text = "".join(lines).encode()
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    stem = f"ultrafeedback_{name}"
    return {
        "count": len(rows),
        "jsonl": _write(directory / f"{stem}.jsonl", lambda path: path.write_bytes(text)),
        "parquet": _write(directory / f"{stem}.parquet", lambda path: pq.write_table(table, path)),
        "prompt_ids": [row["prompt_id"] for row in rows],
    }


def _write(path: Path, write: Callable[[Path], object]) -> Row:
    """A file that appears whole or not at all."""
    aside = path.with_name(path.name + ".partial")
    write(aside)
    aside.replace(path)
    return {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="prepare_ultrafeedback_preferences.py",
        description="Write ultrafeedback_{train,eval}.{jsonl,parquet} and manifest.json.",
    )
    size = number(int, at_least=1)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="directory of the five files")
    parser.add_argument("--train-size", type=size, default=4096, metavar="N", help="pairs from train_prefs")
    parser.add_argument("--eval-size", type=size, default=512, metavar="N", help="pairs from test_prefs")
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        metavar="PATH",
        help=f"a local copy of {DATASET}, as directories or files (default: the hub, revision {REVISION})",
    )
    return parser.parse()


def main() -> None:
    """Read, select, write."""
    args = parse_args()
    sizes = {"train": args.train_size, "eval": args.eval_size}
    subsets: dict[str, list[Row]] = {}
    rejected: dict[str, Row] = {}
    for name, split in SPLITS.items():
        rows = local_rows(local_files(args.source, split=split)) if args.source else hub_rows(split)
        taken = {row["prompt_id"] for subset in subsets.values() for row in subset}
        subsets[name], rejections = select(rows, split=split, count=sizes[name], flag=f"--{name}-size", taken=taken)
        counts = Counter(rejection["code"] for rejection in rejections)
        rejected[name] = {"counts": dict(sorted(counts.items())), "rows": rejections}
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        manifest = {
            "source": {"dataset": DATASET, "revision": REVISION, "splits": SPLITS, "local_copy": bool(args.source)},
            "rule": f'valid first occurrences by sha256("{NAMESPACE}" + prompt_id), ties by prompt_id, smallest first',
            "rejections": rejected,
            "outputs": {name: write_subset(args.output_dir, name, rows) for name, rows in subsets.items()},
        }
        text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
        _write(args.output_dir / "manifest.json", lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--output-dir {args.output_dir}: cannot be written: {error.strerror or error}") from error
    for name, pairs in subsets.items():
        print(f"{name}: {len(pairs)} pairs; rejected {rejected[name]['counts'] or 'none'}")
    print(f"{args.output_dir / 'manifest.json'}")


if __name__ == "__main__":
    run_command(main)
