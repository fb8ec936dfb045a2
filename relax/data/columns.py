"""Which column of a file plays which part, and the numbers that objectives read of a row: a line in `COLUMNS` each.

A name comes from, in this order: an explicit key flag, `--conversation-key-map`, our own name, a usual synonym; in
preprocessing from `map_keys` alone where that names the part.
Invariant: one column plays one part, and a part asked for by flag that the file lacks is an error listing what it has. A column
that no objective of the run reads changes nothing, whatever it holds (`Column.always` has the exception).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax.data.options import DataOptions
from relax.data.rows import Row, RowRejected, shown, without_missing
from relax.errors import UserError

_FLOAT32_MAX = 3.4e38


@dataclass(frozen=True, slots=True)
class Column:
    """A number of a row that travels to the objectives that read it, as fp32.

    default: what a row without one counts as; NaN where that is the objective's to say. The number is at_least <= x < below.
    boolean: it is 0 or 1, also written true and false. single: it is of rows of one completion alone. always: read and part of
    the data's fingerprint whatever the objective reads, as checkpoints know it.
    """

    name: str
    default: float = math.nan
    synonyms: tuple[str, ...] = ()
    at_least: float = -_FLOAT32_MAX
    below: float = math.inf
    boolean: bool = False
    single: bool = False
    always: bool = False

    def parse(self, value: Any) -> float | None:
        """The row's number, None where it has none, which NaN means, too. Raises `RowRejected`."""
        if value is None:
            return None
        if self.boolean:
            return parse_boolean(value, what=self.name)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise RowRejected("schema", f"{self.name} is {shown(value)}, not a number") from None
        except OverflowError:
            number = math.inf
        if math.isnan(number):
            return None
        if isinstance(value, bool) or not abs(number) <= _FLOAT32_MAX:
            raise RowRejected("schema", f"{self.name} is {shown(value)}, not a finite number")
        if not self.at_least <= number < self.below:
            rule = f"at least {self.at_least:g}" + (f" and below {self.below:g}" if self.below < math.inf else "")
            raise RowRejected("schema", f"{self.name} is {shown(value)}: it must be {rule}")
        return number


COLUMNS = {
    column.name: column
    for column in (
        Column("margin", default=0.0, always=True),
        Column("weight", default=1.0, at_least=0.0),
        Column("label_smoothing", at_least=0.0, below=0.5),
        Column("label", boolean=True, single=True),
        Column("score", single=True),
    )
}


def parse_boolean(value: Any, *, what: str) -> float:
    """1.0 or 0.0 of true, false, 1, 0, as such or as text. Raises `RowRejected`."""
    known = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
    found = known.get(str(value).strip().lower()) if isinstance(value, str | int | float) else None
    if found is None:
        raise RowRejected("schema", f"{what} is {shown(value)}, not true or false")
    return found


# Parts, with the names under which published data sets keep them.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction"),
    "query": ("input",),
    "system": (),
    "history": (),
    "chosen": (),
    "rejected": (),
    "conversations": (),
    "completions": (),
    "ranks": (),
    "ratings": ("scores",),
    "completion": (),
    "tie": (),
    "tools": (),
    "chat_template_kwargs": (),
    **{column.name: column.synonyms for column in COLUMNS.values()},
}
COMPLETION_PARTS = ("chosen", "rejected", "completions", "ranks", "ratings", "completion", "tie")
# An instruction has one completion, its response.
INSTRUCTION_SYNONYMS = {part: names for part, names in SYNONYMS.items() if part not in COMPLETION_PARTS}
INSTRUCTION_SYNONYMS["response"] = ("output",)
# What a row may lack; `EMPTY` values, "nan" among them, as Python's csv module writes NaN, mean that it does.
OPTIONAL_PARTS = ("query", "system", "history", "ranks", "ratings", "tie", "tools", "chat_template_kwargs", *COLUMNS)
EMPTY: tuple[Any, ...] = (None, "", "nan", [], {})
MESSAGE_FIELDS = ("role", "content")
ROLES = ("system", "user", "assistant", "tool")
# Carried for people, for `--pair-id-key` and for `relax.score`; known, so their content is not reported as overlooked.
INFORMATION = frozenset({"prompt_id", "id", "subset", "metadata", "score_chosen", "score_rejected"})

# The ShareGPT names, read without a key map.
SHAREGPT_FIELDS = {"from": "role", "value": "content"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The file's column for each part, and the renames inside its messages; `used`: what the last row's reader read."""

    names: dict[str, str]
    fields: dict[str, str]
    roles: dict[str, str]
    pair_id: str | None
    used: set[str] = field(default_factory=set)

    def get(self, row: Row, part: str) -> Any:
        """The row's value for a part, None where the file or the row has none."""
        name = self.names.get(part)
        if name is None:
            return None
        self.used.add(name)
        return row.get(name)

    def unused(self, row: Row, *, unread: Collection[str]) -> list[str]:
        """The row's columns with content that its reader did not read, nor are for people; nothing reads `unread` parts."""
        known = (self.used - {self.names.get(part) for part in unread}) | INFORMATION | {self.pair_id}
        return [name for name in row.keys() - known if without_missing(row[name]) not in EMPTY]


def resolve_columns(available: Collection[str], *, options: DataOptions, path: str) -> Columns:
    """Match the columns found in a file to parts. Raises `UserError` for a flag that names a column it lacks."""
    mapped = _columns_by_part(options.key_map, path=path)
    flags = {
        "prompt": ("--prompt-key", options.prompt_key),
        "chosen": ("--chosen-key", options.chosen_key),
        "rejected": ("--rejected-key", options.rejected_key),
        "tools": ("--tool-key", options.tool_key),
    }
    names = _mapped_parts(available, map_keys=options.map_keys or {}, path=path)
    for part, synonyms in (INSTRUCTION_SYNONYMS if options.single_completion else SYNONYMS).items():
        if part in (options.map_keys or {}):
            continue
        flag, asked = flags.get(part, ("", None))
        if asked and asked != part and asked not in available:
            raise _missing_column(path, flag=flag, name=asked, available=available)
        candidates = ([asked] if asked else []) + mapped.get(part, []) + [part, *synonyms]
        found = next((name for name in candidates if name in available and name not in names.values()), None)
        if found is not None:
            names[part] = found
    if options.pair_id_key and options.pair_id_key not in available:
        raise _missing_column(path, flag="--pair-id-key", name=options.pair_id_key, available=available)
    return Columns(
        names=names,
        fields=SHAREGPT_FIELDS | {k: v for k, v in options.key_map.items() if v in MESSAGE_FIELDS},
        roles=SHAREGPT_ROLES | {k: v for k, v in options.key_map.items() if v in ROLES},
        pair_id=options.pair_id_key,
    )


def _mapped_parts(available: Collection[str], *, map_keys: Mapping[str, str], path: str) -> dict[str, str]:
    """The parts that `map_keys` gives a column. Raises `UserError` for a column that is not there."""
    for part, name in map_keys.items():
        if name and name not in available:
            raise _missing_column(path, flag=f"map_keys: {part}", name=name, available=available)
    return {part: name for part, name in map_keys.items() if name}


def _columns_by_part(key_map: Mapping[str, str], *, path: str) -> dict[str, list[str]]:
    """The key map's column renames, part -> columns. Raises `UserError` for a target that does not exist."""
    parts: dict[str, list[str]] = {}
    for source, target in key_map.items():
        if target in SYNONYMS:
            parts.setdefault(target, []).append(source)
        elif target not in MESSAGE_FIELDS and target not in ROLES:
            known = ", ".join([*SYNONYMS, *MESSAGE_FIELDS, *ROLES])
            raise UserError(
                f"--conversation-key-map maps {source!r} to {target!r} (reading {path}). It maps a name found in the "
                f"file to one of: {known}."
            )
    return parts


def _missing_column(path: str, *, flag: str, name: str, available: Collection[str]) -> UserError:
    return UserError(f"{path}: no column {name!r} ({flag}). The file has: {', '.join(sorted(available))}.")
