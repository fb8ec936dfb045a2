"""Paths that a user gave -> data files.

A file is taken as it is named. A directory stands for the data files right inside it, in name order.

Invariants: nothing in a directory is passed over without a word: what is neither read nor known to be no data (what
the hub and `datasets` put beside data: dataset_infos.json, README.md, ...) is told by `left_out`. A directory that holds
several splits is refused: training on it would train on what was held out.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from relax.data.prefix import SIDECAR_SUFFIX, is_prefix, prefix_files
from relax.data.sources import KINDS, data_kind, is_saved_dataset
from relax.errors import UserError

NAMES_SHOWN = 8

# What stands beside data and is none, in lower case. manifest.json: of scripts/data/prepare_ultrafeedback_preferences.py.
_NO_DATA = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "croissant.json"}) | {
    "manifest.json", "_success",
}  # fmt: skip
_NO_DATA_PATTERN = re.compile(r"\..*|(readme|license|notice|citation|changelog)(\..*)?|.*\.(md|py|lock|sha256|bib|cff)")

# The words by which the hub knows a split from a file's name, between any of its separators.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def expand_paths(paths: Sequence[str]) -> list[Path]:
    """The data files and tokenized prefixes behind `--prompt-data`, directories expanded in name order. Raises `UserError`."""
    try:
        files = [file for path in paths for file in _expand(Path(path))]
    except OSError as error:  # a name too long, a directory closed to this user
        raise UserError(f"{str(error.filename)[:200]}: cannot be read: {error.strerror} (data path).") from None
    if not files:
        raise UserError("No data file was given.")
    return files


def left_out(paths: Sequence[str]) -> tuple[str, ...]:
    """For each directory among `paths` that holds more than is read: one line that names it."""
    found = {path: _split_entries(path)[1] for path in map(Path, paths) if _is_plain_directory(path)}
    return tuple(f"{path}: left out, not read: {_listed(others)}" for path, others in found.items() if others)


def _expand(path: Path) -> list[Path]:
    if is_prefix(path):
        if path.exists():
            raise UserError(f"{path}: the name of {'a directory' if path.is_dir() else 'a file'} and of a tokenized prefix.")
        prefix_files(path)  # says what is missing
        return [path]
    if not path.exists():
        raise UserError(f"{path}: no such file or directory (data path).")
    if _is_plain_directory(path):
        return _directory(path)
    if path.is_file() and not data_kind(path):
        raise UserError(f"{path}: unknown kind of data file {''.join(path.suffixes[-2:])!r}; known: {KINDS}.")
    return [path]


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not is_prefix(path) and not is_saved_dataset(path)


def _directory(path: Path) -> list[Path]:
    files, others = _split_entries(path)
    if not files:
        there = f" There are: {_listed(others)}." if others else ""
        raise UserError(f"{path}: the directory holds no data file ({KINDS}) and no saved dataset.{there}")
    splits: dict[str, list[Path]] = {}
    for file in files:
        if split := split_of(file.name):
            splits.setdefault(split, []).append(file)
    if len(splits) > 1:
        held = "; ".join(f"{split}: {_listed([file.name for file in found])}" for split, found in splits.items())
        first = splits.get("train", files)[0]
        raise UserError(
            f"{path}: the directory holds several splits ({held}), and all of it would be read as one set. Name the files of "
            f"one split instead, such as {first}."
        )
    return files


def _split_entries(path: Path) -> tuple[list[Path], list[str]]:
    """(data files right inside the directory, names of other things that may hold data), both sorted."""
    files: list[Path] = []
    others: list[str] = []
    for entry in sorted(path.iterdir()):
        name = entry.name.lower()
        if name in _NO_DATA or _NO_DATA_PATTERN.fullmatch(name) or name.endswith(SIDECAR_SUFFIX):
            continue
        if entry.is_dir():
            if any(data_kind(file) for file in entry.rglob("*")):
                others.append(f"{entry.name}/")
        elif entry.is_file() and data_kind(entry):
            files.append(entry)
        else:
            others.append(entry.name)
    return files, others


def split_of(name: str) -> str | None:
    """The split that a file's name says it belongs to; None where it says nothing."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for word in words for split, known in _SPLITS.items() if word in known), None)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
