"""The one shape every row format is read into, and the stable reasons for refusing a row.

A `PreferencePair` is a shared history and two answers. Chat formats fill `history`, `chosen`, `rejected`; plain text
formats also carry `text`, which serves tokenizers that have no chat template. Invariant: a `PreferencePair` always has
two non-empty, different answers; what cannot become one raises `RowRejected` with a code of `REASONS`.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from relax.data.json_stream import load_json

Message = dict[str, Any]
Row = dict[str, Any]

_FLOAT32_MAX = 3.4e38

REASONS = {
    "schema": "the row does not hold what its file's format needs, as plain text or messages",
    "prompt_mismatch": "chosen and rejected do not share a prompt",
    "identical": "chosen and rejected are the same answer",
    "post_truncation_identical": "chosen and rejected have the same token ids after truncation",
    "empty_completion": "an answer is empty",
    "oversize": "the pair has more tokens than asked for",
    "duplicate": "the same pair (or pair id) came before",
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
    """A pair as three strings, for tokenizers without a chat template. The answer continues the prompt directly."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """One row: the shared `history`, and the assistant's two answers as messages.

    An instruction row has one answer: `rejected` is `chosen` itself. `rejected_history` is there where the row gives the
    rejected side another one: what the template writes of both must be the same.
    """

    history: tuple[Message, ...]
    chosen: Message
    rejected: Message
    rejected_history: tuple[Message, ...] | None = None
    text: PlainText | None = None
    tools: list[Message] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    margin: float | None = None
    pair_id: str | None = None

    def __post_init__(self) -> None:
        for side, message in (("chosen", self.chosen), ("rejected", self.rejected)):
            if is_empty_answer(message):
                raise RowRejected("empty_completion", f"{side} is empty")
        if self.chosen == self.rejected and self.chosen is not self.rejected:
            raise RowRejected("identical", "chosen and rejected are equal")
        texts = [self.history, self.chosen, self.rejected, self.rejected_history, self.tools, self.template_kwargs]
        if not _is_text(texts):
            raise RowRejected("schema", "the text holds half of a surrogate pair, which no tokenizer reads")


def is_empty_answer(message: Message) -> bool:
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


def parse_margin(value: Any) -> float | None:
    """The row's margin, or None where it has none, which NaN means, too. Infinities are refused."""
    if value is None:
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        raise RowRejected("schema", f"margin is {shown(value)}, not a number") from None
    except OverflowError:
        margin = math.inf
    if math.isnan(margin):
        return None
    if isinstance(value, bool) or not abs(margin) <= _FLOAT32_MAX:
        raise RowRejected("schema", f"margin is {shown(value)}, not a finite number")
    return margin


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
