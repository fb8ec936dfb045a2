"""Row formats: detect one per file, then read every row of the file as that format.

| format | rows |
| --- | --- |
| implicit_prompt | `chosen`, `rejected`: message lists with the same history |
| explicit_prompt | `prompt` (string or messages) + one answer each (string, message, or one-message list) |
| alpaca | `prompt` and/or `query` strings, `system`, `history` [[question, answer], ...] + one answer each |
| sharegpt | `conversations` with from/value + one answer each |
| alpaca_instruction | as alpaca with one answer, `response`, which stands for both; read only where it is asked for |
| dialogue | `\\n\\nHuman: ...\\n\\nAssistant: ...` strings, whole or behind a `prompt` |

A file has the format that most of its sampled rows have. explicit_prompt and alpaca are two names of one reading: it is
called alpaca where rows fill query, system or history.

Invariants: how a row is read depends on the row and its file's format, never on which row comes first; a row of another
format than its file's is refused as `schema`, never read some other way; a column that a row's reader did not read is not
counted as used. No row's prompt ends with the assistant.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from relax.data.columns import Columns
from relax.data.messages import answer_message, clean_row, read_messages
from relax.data.options import INSTRUCTION, DataOptions
from relax.data.rows import (
    Message,
    PlainText,
    PreferencePair,
    Row,
    RowRejected,
    describe,
    is_empty_answer,
    parse_json_column,
    parse_margin,
    printable,
    shown,
)
from relax.errors import UserError

_TURN = re.compile(r"(?:\n\n|\A\s*)(Human|Assistant):")
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}


class Parts(NamedTuple):
    """A format's reading of a row: what comes before the answers, both answers, the plain text where the format is plain
    text, and the rejected side's own history where it is not the same.
    """

    history: list[Message]
    chosen: Message
    rejected: Message
    text: PlainText | None = None
    rejected_history: list[Message] | None = None


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
            "unless they are whole conversations). Name the columns with --chosen-key, --rejected-key, --prompt-key or "
            "--conversation-key-map (in preprocessing: map_keys)."
        )
    readings = Counter(map(_reading, formats.elements()))
    name = max(formats, key=lambda name: (readings[_reading(name)], formats[name]))
    if allowed and name not in allowed:
        raise UserError(
            f"{path}: its rows are {name}, and this handler_name reads {', '.join(allowed)}: choose another handler."
        )
    return name


def _reading(name: str) -> str:
    """The format under whose name its rows are read."""
    return "explicit_prompt" if name == "alpaca" else name


def _format_of_raw(row: Any, columns: Columns) -> str | None:
    try:
        return _format_of(clean_row(row, columns), columns) if isinstance(row, dict) else None
    except RowRejected:
        return None


def _format_of(row: Row, columns: Columns) -> str | None:
    """A row's own format, by what it holds; None for one that has none."""
    chosen, rejected, prompt = (columns.get(row, part) for part in ("chosen", "rejected", "prompt"))
    if chosen is None or rejected is None:
        return None
    if columns.get(row, "conversations"):
        return "sharegpt"
    lists = [side for side in (chosen, rejected) if isinstance(side, list)]
    if lists and not (prompt and all(_begins_with_answer(side, columns) for side in lists)):
        return "implicit_prompt"
    if isinstance(prompt, str) and _is_dialogue(prompt):
        return "dialogue"
    if not isinstance(prompt, list) and (columns.get(row, "query") or prompt):
        return "alpaca" if any(columns.get(row, part) for part in ("query", "system", "history")) else "explicit_prompt"
    if prompt:
        return "explicit_prompt"
    return "dialogue" if isinstance(chosen, str) and _is_dialogue(chosen) else None


def _begins_with_answer(messages: list[Any], columns: Columns) -> bool:
    """What follows a prompt, where a whole conversation would begin with a message of the system or the user."""
    if not messages or not isinstance(messages[0], dict):
        return True
    first = messages[0]
    role = next((value for name, value in first.items() if columns.fields.get(name, name) == "role"), None)
    return isinstance(role, str) and columns.roles.get(role, role) in ("assistant", "tool")


def read_pair(row: Any, *, name: str, columns: Columns, options: DataOptions) -> PreferencePair:
    """Read one row as the file's format; `columns.used` says what of it. Raises `RowRejected`."""
    if not isinstance(row, dict):
        raise RowRejected("schema", f"the row is {'null' if row is None else describe(row)}, not an object")
    row = clean_row(row, columns)
    for side in ("response",) if name == INSTRUCTION else ("chosen", "rejected"):
        if columns.get(row, side) is None:
            raise RowRejected("schema", f"{side} is missing")
    own = None if name == INSTRUCTION else _format_of(row, columns)
    if own and _reading(own) != _reading(name):
        raise RowRejected("schema", f"the row is {own}, and most rows of its file are {name}")
    columns.used.clear()  # what finding the format looked at, reading it may leave alone
    parts = READERS[name](row, columns)
    history, other_history = (_with_system_prompt(side, options) for side in (parts.history, parts.rejected_history or []))
    for messages in (history, other_history):
        if messages and messages[-1]["role"] == "assistant":
            raise RowRejected(
                "schema", "the prompt ends with the assistant's own words: put them at the start of both answers instead"
            )
    return PreferencePair(
        history=tuple(history),
        chosen=parts.chosen,
        rejected=parts.rejected,
        rejected_history=tuple(other_history) if parts.rejected_history else None,
        text=None if options.system_prompt else parts.text,
        tools=parse_json_column(columns.get(row, "tools"), column="tools", kind=list),
        template_kwargs=parse_json_column(columns.get(row, "chat_template_kwargs"), column="chat_template_kwargs", kind=dict)
        or {},
        margin=parse_margin(columns.get(row, "margin")),
        pair_id=_pair_id(row, columns),
    )


def _with_system_prompt(history: list[Message], options: DataOptions) -> list[Message]:
    if not options.system_prompt or (history and history[0]["role"] == "system"):
        return history
    return [{"role": "system", "content": options.system_prompt}, *history]


def _pair_id(row: Row, columns: Columns) -> str | None:
    if columns.pair_id is None:
        return None
    value = row.get(columns.pair_id)
    if value is None or value == "":
        raise RowRejected("schema", f"{columns.pair_id} (--pair-id-key) is missing")
    return str(value)


def _implicit_prompt(row: Row, columns: Columns) -> Parts:
    values = {side: columns.get(row, side) for side in ("chosen", "rejected")}
    for side, value in values.items():
        if value in ([], ""):
            raise RowRejected("empty_completion", f"{side} is empty")
    sides = {side: read_messages(value, what=side, columns=columns) for side, value in values.items()}
    _refuse_unanswered(sides)
    for side, messages in sides.items():
        if messages[-1]["role"] != "assistant":
            raise RowRejected("schema", f"{side} ends with role {shown(messages[-1]['role'])}, not assistant")
        if len(messages) < 2:
            raise RowRejected("schema", f"{side} holds an answer and nothing that it answers")
    histories = [_with_system(row, columns, messages[:-1]) for messages in sides.values()]
    other = histories[1] if histories[0] != histories[1] else None
    return Parts(histories[0], sides["chosen"][-1], sides["rejected"][-1], rejected_history=other)


def _refuse_unanswered(sides: dict[str, list[Message]]) -> None:
    """Raise `RowRejected` where one side is only the beginning of the other: nothing is left that answers."""
    (chosen, first), (rejected, second) = sides.items()
    for side, short, long in ((chosen, first, second), (rejected, second, first)):
        if len(short) < len(long) and long[: len(short)] == short:
            raise RowRejected("empty_completion", f"{side} is only the beginning of the other side, with no answer of its own")


def _explicit_prompt(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt")
    if isinstance(prompt, list | dict):
        history = _with_system(row, columns, read_messages(prompt, what="prompt", columns=columns))
        return _with_answers(row, columns, history)
    history, question = _question(row, columns)
    return _with_answers(row, columns, history)._replace(text=_plain_text(row, columns, history, question))


def _alpaca_instruction(row: Row, columns: Columns) -> Parts:
    history, question = _question(row, columns)
    response = columns.get(row, "response")
    answer = answer_message(response, what="response", columns=columns)
    if is_empty_answer(answer):
        raise RowRejected("empty_completion", "response is empty")
    plain = len(history) == 1 and isinstance(response, str)
    text = PlainText(prompt=question, chosen=response, rejected=response) if plain else None
    return Parts(history, answer, answer, text)


def _question(row: Row, columns: Columns) -> tuple[list[Message], str]:
    """(everything before the answer, the last question): system, history, and prompt and query joined by a newline."""
    history: list[Message] = []
    for turn in parse_json_column(columns.get(row, "history"), column="history", kind=list) or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RowRejected("schema", "history is not a list of [question, answer] strings")
        history += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    texts = {part: columns.get(row, part) for part in ("prompt", "query")}
    for part, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise RowRejected("schema", f"{part} is {describe(text)}, not a string")
    if not any(texts.values()):
        raise RowRejected(
            "schema", "prompt is missing" if "query" not in columns.names else "prompt and query are both missing"
        )
    question = "\n".join(text for text in texts.values() if text)
    return _with_system(row, columns, [*history, {"role": "user", "content": question}]), question


def _sharegpt(row: Row, columns: Columns) -> Parts:
    messages = read_messages(columns.get(row, "conversations"), what="conversations", columns=columns)
    return _with_answers(row, columns, _with_system(row, columns, messages))


def _dialogue(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt") or ""
    sides = [columns.get(row, side) for side in ("chosen", "rejected")]
    if not all(isinstance(text, str) for text in (prompt, *sides)):
        raise RowRejected("schema", "a dialogue is not a string")
    (history, chosen, head), (other_history, rejected, other_head) = (_split_dialogue(prompt + text) for text in sides)
    _refuse_unanswered({"chosen": [*history, chosen], "rejected": [*other_history, rejected]})
    if history != other_history:
        raise RowRejected("prompt_mismatch", "the two dialogues differ before their last answer")
    text = PlainText(prompt=head, chosen=(prompt + sides[0])[len(head) :], rejected=(prompt + sides[1])[len(other_head) :])
    return Parts(history, chosen, rejected, text)


READERS: dict[str, Callable[[Row, Columns], Parts]] = {
    "implicit_prompt": _implicit_prompt,
    "explicit_prompt": _explicit_prompt,
    "alpaca": _explicit_prompt,
    INSTRUCTION: _alpaca_instruction,
    "sharegpt": _sharegpt,
    "dialogue": _dialogue,
}

# The parts that each format reads beside the answers and the optional ones.
FORMAT_PARTS: dict[str, tuple[str, ...]] = {
    "implicit_prompt": ("system",),
    "explicit_prompt": ("prompt", "query", "system", "history"),
    "alpaca": ("prompt", "query", "system", "history"),
    INSTRUCTION: ("prompt", "query", "system", "history", "response"),
    "sharegpt": ("conversations", "system"),
    "dialogue": ("prompt",),
}

# Where a handler is for this format: of each line, one part needs a column.
REQUIRED_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "alpaca": (("prompt", "query"), ("chosen",), ("rejected",)),
    INSTRUCTION: (("prompt", "query"), ("response",)),
    "sharegpt": (("conversations",), ("chosen",), ("rejected",)),
}


def _is_dialogue(text: str) -> bool:
    match = _TURN.match(text)
    return match is not None and "\n\nAssistant:" in text


def _split_dialogue(text: str) -> tuple[list[Message], Message, str]:
    """(history, last answer, the text up to the last answer) of a dialogue string."""
    turns = list(_TURN.finditer(text))
    if len(turns) < 2 or turns[0].start() != 0 or turns[-1][1] != "Assistant":
        raise RowRejected("schema", "the text is not a dialogue of Human: and Assistant: turns that ends with Assistant:")
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    messages = [
        {"role": _DIALOGUE_ROLES[turn[1]], "content": text[turn.end() : end].strip()}
        for turn, end in zip(turns, ends, strict=True)
    ]
    return messages[:-1], messages[-1], text[: turns[-1].end()]


def _with_system(row: Row, columns: Columns, history: list[Message]) -> list[Message]:
    system = columns.get(row, "system")
    if not system:
        return history
    if not isinstance(system, str):
        raise RowRejected("schema", f"system is {describe(system)}, not a string")
    if history[0]["role"] != "system":
        return [{"role": "system", "content": system}, *history]
    if history[0]["content"] != system:
        raise RowRejected("schema", "the row has a system column and another system message")
    return history


def _with_answers(row: Row, columns: Columns, history: list[Message]) -> Parts:
    chosen, rejected = (answer_message(columns.get(row, side), what=side, columns=columns) for side in ("chosen", "rejected"))
    return Parts(history, chosen, rejected)


def _plain_text(row: Row, columns: Columns, history: list[Message], prompt: str) -> PlainText | None:
    chosen, rejected = columns.get(row, "chosen"), columns.get(row, "rejected")
    if len(history) == 1 and isinstance(chosen, str) and isinstance(rejected, str):
        return PlainText(prompt=prompt, chosen=chosen, rejected=rejected)
    return None
