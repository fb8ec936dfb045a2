"""The one shape every row format is read into, and the stable reasons for refusing a row.

A `Group` is a shared history and its completions, best first: two for a preference pair. Chat formats fill `history` and
`completions`; plain text formats also carry `text`, which serves tokenizers that have no chat template. Invariant: the
completions of a `Group` are not empty and differ; what cannot become one raises `RowRejected` with a code of `REASONS`.
"""

import json
import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from relax.data.json_stream import load_json

Message = dict[str, Any]
Row = dict[str, Any]

REASONS = {
    "schema": "the row does not hold what its file's format needs, as plain text or messages",
    "prompt_mismatch": "the completions do not share a prompt",
    "identical": "two completions are the same",
    "post_truncation_identical": "two completions have the same token ids after truncation",
    "empty_completion": "a completion is empty",
    "oversize": "the row has more tokens than asked for",
    "duplicate": "the same row (or pair id) came before",
    "boundary": "the shared prompt ends before the assistant's turn begins",
}
# Dropped as asked (`--sft-oversize-strategy skip`, a file given twice): such a row is not a bad one.
DELIBERATE = frozenset({"oversize", "duplicate"})


class RowRejected(Exception):
    """A row that cannot be trained on: `code` of `REASONS`, and what is wrong with this row."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PlainText:
    """A row as strings, for tokenizers without a chat template. A completion continues the prompt directly."""

    prompt: str
    completions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row: the shared `history`, and the assistant's completions of it as messages, best first.

    `ranks` from 1, the best: there where completions are tied, () where each is better than the next. `histories`: each
    completion's own, there where the row gives several: what the template writes of them must be the same. `columns`: the
    numbers that the row has, by their names in `relax.data.columns`.
    """

    history: tuple[Message, ...]
    completions: tuple[Message, ...]
    ranks: tuple[int, ...] = ()
    histories: tuple[tuple[Message, ...], ...] = ()
    text: PlainText | None = None
    tools: list[Message] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, float] = field(default_factory=dict)
    pair_id: str | None = None

    def __post_init__(self) -> None:
        names = completion_names(len(self.completions))
        for name, message in zip(names, self.completions, strict=True):
            if is_empty_completion(message):
                raise RowRejected("empty_completion", f"{name} is empty")
        for (name, message), (other, same) in combinations(zip(names, self.completions, strict=True), 2):
            if message == same:
                raise RowRejected("identical", f"{name} and {other} are equal")
        texts = [self.history, self.completions, self.histories, self.tools, self.template_kwargs]
        if not _is_text(texts):
            raise RowRejected("schema", "the text holds half of a surrogate pair, which no tokenizer reads")

    def history_of(self, completion: int) -> tuple[Message, ...]:
        """What the row says came before a completion."""
        return self.histories[completion] if self.histories else self.history


def completion_names(number: int) -> tuple[str, ...]:
    """What messages call a row's completions."""
    if number == 2:
        return "chosen", "rejected"
    return ("completion",) if number == 1 else tuple(f"completion {place} by rank" for place in range(1, number + 1))


def is_empty_completion(message: Message) -> bool:
    """No text, no tool call, no reasoning: nothing that the model could be trained to say."""
    others = ("tool_calls", "reasoning_content", "reasoning", "thinking")
    return not str(message.get("content") or "").strip() and not any(message.get(name) for name in others)


def _is_text(content: Any) -> bool:
    """Whether every string in it can be encoded."""
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_json_column(value: Any, *, column: str, kind: type) -> Any:
    """A column that holds a list or a dict, as such or as JSON text; None where it is absent or empty."""
    if isinstance(value, str) and value.strip():
        try:
            value = without_missing(load_json(value))
        except ValueError:
            raise RowRejected("schema", f"{column} is not valid JSON") from None
    if not value:
        return None
    if not isinstance(value, kind):
        raise RowRejected("schema", f"{column} is {describe(value)}, not {kind.__name__}")
    return value


def without_missing(value: Any) -> Any:
    """The value without the fields that are null or NaN: tables fill in what a row lacks, JSON need not hold it.

    In lists, where every place counts, NaN is null.
    """
    if isinstance(value, dict):
        return {name: without_missing(field) for name, field in value.items() if not is_missing(field)}
    if isinstance(value, list):
        return [without_missing(entry) for entry in value]
    return None if is_missing(value) else value


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def shown(value: Any, *, at_most: int = 60) -> str:
    """A value for a message: in quotes where it is text, cut where it is long, and printable whatever it is."""
    text = repr(value)
    return text if len(text) <= at_most else f"{text[:at_most]}..."


def printable(text: str) -> str:
    """Text that can be printed and written: halves of surrogate pairs as escapes."""
    return text.encode(errors="backslashreplace").decode()


def describe(value: Any) -> str:
    """A short name of a value's shape, for messages."""
    if value is None:
        return "missing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    names = {str: "a string", dict: "an object", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
