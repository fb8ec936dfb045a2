"""A tokenized prefix on disk: its files' names, and the sidecar that says what it was made with.

`PREFIX_packed_FIELD_document.{bin,idx}` hold one sequence of token ids a row (Megatron's indexed format), the fields as
MindSpeed-RL names them. `PREFIX_packed.json`, the sidecar, is ours: a prefix without one loads, but nothing can be
checked against the tokenizer.

Invariant: a prefix is read whole or not at all, and files that differ from what their sidecar says are refused.
"""

import json
from pathlib import Path
from typing import Any

from relax.errors import UserError

PAIR_FIELDS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
INSTRUCTION_FIELDS = ("input_ids", "labels", "attention_mask")
SIDECAR_SUFFIX = "_packed.json"
SIDECAR = {  # what is read of one
    "files": dict,
    "num_pairs": int,
    "template": {"prompt_type": str, "sha256": str | None, "kwargs": dict},
    "tokenizer": {"path": str, "size": int, "sha256": str},
}
IGNORED = -100  # the label of a token that is not trained on


def field_path(prefix: Path, field: str) -> str:
    """A field's files without their suffix."""
    return f"{prefix}_packed_{field}_document"


def field_files(prefix: Path, field: str) -> tuple[Path, Path]:
    """A field's (.bin, .idx)."""
    return Path(f"{field_path(prefix, field)}.bin"), Path(f"{field_path(prefix, field)}.idx")


def sidecar_path(prefix: Path) -> Path:
    return Path(f"{prefix}{SIDECAR_SUFFIX}")


def is_prefix(path: Path) -> bool:
    """Whether any file of a tokenized prefix is there."""
    fields = (*PAIR_FIELDS, *INSTRUCTION_FIELDS)
    return any(file.is_file() for field in fields for file in field_files(path, field))


def prefix_files(prefix: Path) -> list[Path]:
    """All files of a prefix of pairs, the sidecar where there is one. Raises `UserError` for one that is not complete."""
    files = [file for field in PAIR_FIELDS for file in field_files(prefix, field)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        instruction = all(file.is_file() for field in INSTRUCTION_FIELDS for file in field_files(prefix, field))
        why = "it holds instructions, and training needs pairs" if instruction else "it is not complete"
        raise UserError(f"{prefix}: a tokenized prefix without {missing[0].name}: {why}. Preprocess the data again.")
    return files + [file for file in (sidecar_path(prefix),) if file.is_file()]


def read_sidecar(prefix: Path) -> dict[str, Any] | None:
    """What the prefix was made with; None where it has no sidecar. Raises `UserError` for one that cannot be read."""
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
        _check_shape(sidecar, SIDECAR)
        _check_shape(sidecar["template"].get("text"), str | None)  # older ones do not say it
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not a sidecar of relax.preprocess: {error!r}. Preprocess the data again.") from None
    return dict(sidecar)


def _check_shape(value: Any, shape: Any) -> None:
    """Raise KeyError or TypeError where a value is not what the shape, a type or a dictionary of shapes, asks for."""
    if not isinstance(value, dict if isinstance(shape, dict) else shape):
        raise TypeError(f"{str(value)[:40]!r} in the place of {'an object' if isinstance(shape, dict) else shape}")
    if isinstance(shape, dict):
        for name, part in shape.items():
            _check_shape(value[name], part)


def check_digest(file: Path, *, prefix: Path, sidecar: dict[str, Any], sha256: str) -> None:
    """Raise `UserError` where one of the prefix's files is not the one that the sidecar was written for."""
    said = sidecar["files"].get(file.name.removeprefix(prefix.name))
    if file != sidecar_path(prefix) and said != sha256:
        raise UserError(
            f"{file} has SHA-256 {sha256[:16]}, but {sidecar_path(prefix).name} says {str(said)[:16]}: it is damaged, or of "
            "another run. Preprocess the data again."
        )
