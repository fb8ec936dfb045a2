"""What a row has beside its prompt: one completion, two of which one is chosen, or several in order of rank.

Invariants: completions come best first, equally good ones in the row's order; ranks are there where some are equally good, from
1 and without gaps. Which reading a row has depends on the columns that it fills, and two of them at once are refused.
"""

import math
from typing import Any, NamedTuple

from relax.data.columns import Columns
from relax.data.messages import completion_message
from relax.data.rows import Message, Row, RowRejected, describe, is_empty_completion, parse_json_column, shown


class Completions(NamedTuple):
    """Completions best first; ranks where some are tied; their text where all were given as text."""

    messages: tuple[Message, ...]
    ranks: tuple[int, ...] = ()
    texts: tuple[str, ...] | None = None


def read_completions(row: Row, columns: Columns) -> Completions:
    """The completions of a row with a prompt. Raises `RowRejected`."""
    if columns.get(row, "chosen") is not None and columns.get(row, "rejected") is not None:
        return _messages({side: columns.get(row, side) for side in ("chosen", "rejected")}, columns)
    if columns.get(row, "completions") is not None:
        return _ranking(row, columns)
    return _messages({"completion": columns.get(row, "completion")}, columns)


def read_instruction(row: Row, columns: Columns) -> Completions:
    """The response of an instruction. Raises `RowRejected`."""
    found = _messages({"response": columns.get(row, "response")}, columns)
    if is_empty_completion(found.messages[0]):
        raise RowRejected("empty_completion", "response is empty")
    return found


def _messages(values: dict[str, Any], columns: Columns) -> Completions:
    messages = tuple(completion_message(value, what=name, columns=columns) for name, value in values.items())
    texts = tuple(values.values()) if all(isinstance(value, str) for value in values.values()) else None
    return Completions(messages, texts=texts)


def _ranking(row: Row, columns: Columns) -> Completions:
    given = parse_json_column(columns.get(row, "completions"), column="completions", kind=list) or []
    if len(given) < 2:
        raise RowRejected("schema", f"completions holds {len(given)}: a ranking has two or more, and one is a completion")
    found = _messages({f"completion {place}": value for place, value in enumerate(given, start=1)}, columns)
    badness = _badness(row, columns, number=len(given))
    order = sorted(range(len(given)), key=badness.__getitem__)
    rank = {value: place for place, value in enumerate(sorted(set(badness)), start=1)}
    return Completions(
        messages=tuple(found.messages[i] for i in order),
        ranks=tuple(rank[badness[i]] for i in order) if len(rank) < len(order) else (),
        texts=None if found.texts is None else tuple(found.texts[i] for i in order),
    )


def _badness(row: Row, columns: Columns, *, number: int) -> list[float]:
    """A number for each completion, the least for the best: its rank, or its rating with the other sign."""
    lists = {
        part: parse_json_column(value, column=part, kind=list)
        for part in ("ranks", "ratings")
        if (value := columns.get(row, part)) is not None
    }
    if len(lists) != 1:
        raise RowRejected("schema", "completions need ranks or ratings" + (", not both" if lists else ""))
    ((part, values),) = lists.items()
    if len(values or []) != number:
        raise RowRejected("schema", f"{part} is {describe(values)} for {number} completions")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RowRejected("schema", f"{part} holds {shown(value)}, not a finite number")
        if part == "ranks" and (value < 0 or value != int(value)):
            raise RowRejected("schema", f"ranks holds {shown(value)}, not a whole number from 0")
    return [value if part == "ranks" else -value for value in values]
