"""Which row format a file has: the one that most of its sampled rows have (`formats` has what they are).

Invariant: a row's own format depends on what it holds alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from relax.data.columns import Columns
from relax.data.dialogue import is_dialogue
from relax.data.messages import clean_row
from relax.data.options import INSTRUCTION
from relax.data.rows import Row, RowRejected, printable
from relax.errors import UserError

OTHER_GROUPS = {"ranking": "completions", "unpaired": "completion"}  # formats of rows that are no pairs, by what such a row has
# Where a handler is for this format: of each line, one part needs a column.
REQUIRED_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "alpaca": (("prompt", "query"), ("chosen",), ("rejected",)),
    INSTRUCTION: (("prompt", "query"), ("response",)),
    "sharegpt": (("conversations",), ("chosen",), ("rejected",)),
}


def choose_format(rows: Sequence[Any], *, columns: Columns, path: str, allowed: Sequence[str]) -> str:
    """The format that most of these rows have, which must be one of `allowed` if any is.

    Raises `UserError` listing the columns when no row has a format, or the columns of the only one allowed are not there.
    """
    found = ", ".join(sorted({printable(key) for row in rows if isinstance(row, dict) for key in row})) or "none"
    for parts in REQUIRED_PARTS.get(allowed[0], ()) if allowed else ():
        if not any(part in columns.names for part in parts):
            raise UserError(f"{path}: no column for {' or '.join(parts)} (map_keys). The file has: {found}.")
    if INSTRUCTION in allowed:
        return INSTRUCTION
    formats = Counter(name for row in rows if (name := _format_of_raw(row, columns)))
    if not formats:
        raise UserError(
            f"{path}: no row holds a preference pair. Columns found: {found}; needed: chosen and rejected (with a prompt, "
            "unless they are whole conversations), or a prompt with completions and ranks, or with one completion. Name the "
            "columns with --chosen-key, --rejected-key, --prompt-key or --conversation-key-map (in preprocessing: map_keys)."
        )
    readings = Counter(map(reading, formats.elements()))
    name = max(formats, key=lambda name: (readings[reading(name)], formats[name]))
    if allowed and name in OTHER_GROUPS:
        raise UserError(f"{path}: its rows are {name}, and tokenized files hold pairs: give the rows to training itself.")
    if allowed and name not in allowed:
        raise UserError(
            f"{path}: its rows are {name}, and this handler_name reads {', '.join(allowed)}: choose another handler."
        )
    return name


def reading(name: str) -> str:
    """The format under whose name its rows are read."""
    return "explicit_prompt" if name in ("alpaca", *OTHER_GROUPS) else name


def _format_of_raw(row: Any, columns: Columns) -> str | None:
    try:
        return format_of(clean_row(row, columns), columns) if isinstance(row, dict) else None
    except RowRejected:
        return None


def format_of(row: Row, columns: Columns) -> str | None:
    """A row's own format, by what it holds; None for one that has none."""
    chosen, rejected, prompt = (columns.get(row, part) for part in ("chosen", "rejected", "prompt"))
    if chosen is None or rejected is None:
        others = (name for name, part in OTHER_GROUPS.items() if columns.get(row, part) is not None)
        return next(others, None) if prompt or columns.get(row, "query") else None
    if columns.get(row, "conversations"):
        return "sharegpt"
    lists = [side for side in (chosen, rejected) if isinstance(side, list)]
    if lists and not (prompt and all(_begins_with_answer(side, columns) for side in lists)):
        return "implicit_prompt"
    if isinstance(prompt, str) and is_dialogue(prompt):
        return "dialogue"
    if not isinstance(prompt, list) and (columns.get(row, "query") or prompt):
        return "alpaca" if any(columns.get(row, part) for part in ("query", "system", "history")) else "explicit_prompt"
    if prompt:
        return "explicit_prompt"
    return "dialogue" if isinstance(chosen, str) and is_dialogue(chosen) else None


def _begins_with_answer(messages: list[Any], columns: Columns) -> bool:
    """What follows a prompt, where a whole conversation would begin with a message of the system or the user."""
    if not messages or not isinstance(messages[0], dict):
        return True
    first = messages[0]
    role = next((value for name, value in first.items() if columns.fields.get(name, name) == "role"), None)
    return isinstance(role, str) and columns.roles.get(role, role) in ("assistant", "tool")
