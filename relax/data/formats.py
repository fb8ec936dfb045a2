"""Row formats: detect one per file, then read every row of the file as that format.

| format | rows |
| --- | --- |
| implicit_prompt | `chosen`, `rejected`: message lists with the same history |
| explicit_prompt | `prompt` (string or messages) + one answer each (string, message, or one-message list) |
| alpaca | `prompt` and/or `query` strings, `system`, `history` [[question, answer], ...] + one answer each |
| sharegpt | `conversations` with from/value + one answer each |
| alpaca_instruction | as alpaca with one answer, `response`, which stands for both; read only where it is asked for |
| dialogue | `\\n\\nHuman: ...\\n\\nAssistant: ...` strings, whole or behind a `prompt` |

Invariant: a row of another format than its file's is refused as `schema`, never read some other way.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from relax.data.columns import Columns
from relax.data.messages import answer_message, read_messages
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
)
from relax.errors import UserError

_TURN = re.compile(r"(?:\n\n|\A\s*)(Human|Assistant):")
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}

# A format's reading of a row: the history, both answers, and the plain text where the format is plain text.
Parts = tuple[list[Message], Message, Message, PlainText | None]


def choose_format(rows: Sequence[Any], *, columns: Columns, path: str, allowed: Sequence[str]) -> str:
    """The format of a file: the only one allowed, else the first row's that has one, which must be among `allowed` if any is.

    Raises `UserError` listing the columns when no row has a format, or the columns of the only one are not there.
    """
    found = sorted({key for row in rows if isinstance(row, dict) for key in row})
    if len(allowed) == 1:
        for parts in REQUIRED_PARTS[allowed[0]]:
            if not any(part in columns.names for part in parts):
                raise UserError(f"{path}: no column for {' or '.join(parts)} (map_keys). The file has: {', '.join(found)}.")
        return allowed[0]
    name = _detect_format(rows, columns=columns, found=found, path=path)
    if allowed and name not in allowed:
        raise UserError(
            f"{path}: its rows are {name}, and this handler_name reads {', '.join(allowed)}: choose another handler."
        )
    return name


def _detect_format(rows: Sequence[Any], *, columns: Columns, found: Sequence[str], path: str) -> str:
    for row in rows:
        if isinstance(row, dict) and (name := _format_of(row, columns)):
            return name
    raise UserError(
        f"{path}: no row holds a preference pair. Columns found: {', '.join(found) or 'none'}; needed: chosen and "
        "rejected (with a prompt, unless they are whole conversations). Name the columns with --chosen-key, "
        "--rejected-key, --prompt-key or --conversation-key-map."
    )


def _format_of(row: Row, columns: Columns) -> str | None:
    chosen, prompt = columns.get(row, "chosen"), columns.get(row, "prompt")
    if not chosen or not columns.get(row, "rejected"):
        return None
    if columns.get(row, "conversations"):
        return "sharegpt"
    if isinstance(chosen, list) and not (prompt and (len(chosen) == 1 or _begins_with_answer(chosen, columns))):
        return "implicit_prompt"
    if isinstance(prompt, str) and prompt and _is_dialogue(prompt):
        return "dialogue"
    if any(columns.get(row, part) for part in ("query", "system", "history")) and not isinstance(prompt, list):
        return "alpaca"
    if prompt:
        return "explicit_prompt"
    return "dialogue" if isinstance(chosen, str) and _is_dialogue(chosen) else None


def _begins_with_answer(messages: list[Any], columns: Columns) -> bool:
    """Messages that follow a prompt, where a whole conversation would begin with the system or the user."""
    first = messages[0] if isinstance(messages[0], dict) else {}
    role = next((value for name, value in first.items() if columns.fields.get(name, name) == "role"), None)
    return isinstance(role, str) and columns.roles.get(role, role) in ("assistant", "tool")


def read_pair(row: Any, *, name: str, columns: Columns, options: DataOptions) -> PreferencePair:
    """Read one row as the file's format. Raises `RowRejected`."""
    if not isinstance(row, dict):
        raise RowRejected("schema", f"the row is {'null' if row is None else describe(row)}, not an object")
    for side in ("response",) if name == INSTRUCTION else ("chosen", "rejected"):
        if columns.get(row, side) is None:
            raise RowRejected("schema", f"{side} is missing")
    history, chosen, rejected, text = READERS[name](row, columns)
    if options.system_prompt and not (history and history[0]["role"] == "system"):
        history = [{"role": "system", "content": options.system_prompt}, *history]
    return PreferencePair(
        history=tuple(history),
        chosen=chosen,
        rejected=rejected,
        text=None if options.system_prompt else text,
        tools=parse_json_column(columns.get(row, "tools"), column="tools", kind=list),
        template_kwargs=parse_json_column(columns.get(row, "chat_template_kwargs"), column="chat_template_kwargs", kind=dict)
        or {},
        margin=parse_margin(columns.get(row, "margin")),
        pair_id=_pair_id(row, columns),
    )


def _pair_id(row: Row, columns: Columns) -> str | None:
    if columns.pair_id is None:
        return None
    value = row.get(columns.pair_id)
    if value is None or value == "":
        raise RowRejected("schema", f"{columns.pair_id} (--pair-id-key) is missing")
    return str(value)


def _implicit_prompt(row: Row, columns: Columns) -> Parts:
    sides = [read_messages(columns.get(row, side), what=side, columns=columns) for side in ("chosen", "rejected")]
    for side, messages in zip(("chosen", "rejected"), sides, strict=True):
        if messages[-1]["role"] != "assistant":
            raise RowRejected("schema", f"{side} ends with role {messages[-1]['role']!r}, not assistant")
        if len(messages) < 2:
            raise RowRejected("schema", f"{side} holds an answer and nothing that it answers")
    chosen, rejected = sides
    if chosen[:-1] != rejected[:-1]:
        raise RowRejected("prompt_mismatch", "chosen and rejected have different histories")
    return chosen[:-1], chosen[-1], rejected[-1], None


def _explicit_prompt(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt")
    if not prompt:
        raise RowRejected("schema", "prompt is missing")
    if not isinstance(prompt, str):
        history = _with_system(row, columns, read_messages(prompt, what="prompt", columns=columns))
        return *_with_answers(row, columns, history), None
    history = [{"role": "user", "content": prompt}]
    return *_with_answers(row, columns, history), _plain_text(row, columns, prompt)


def _alpaca(row: Row, columns: Columns) -> Parts:
    history, prompt = _alpaca_question(row, columns)
    return *_with_answers(row, columns, history), _plain_text(row, columns, prompt) if len(history) == 1 else None


def _alpaca_instruction(row: Row, columns: Columns) -> Parts:
    history, prompt = _alpaca_question(row, columns)
    response = columns.get(row, "response")
    answer = answer_message(response, what="response", columns=columns)
    if is_empty_answer(answer):
        raise RowRejected("empty_completion", "response is empty")
    plain = len(history) == 1 and isinstance(response, str)
    return history, answer, answer, PlainText(prompt=prompt, chosen=response, rejected=response) if plain else None


def _alpaca_question(row: Row, columns: Columns) -> tuple[list[Message], str]:
    """(everything before the answer, the last question): system, history, and prompt and query joined by a newline."""
    history: list[Message] = []
    for turn in parse_json_column(columns.get(row, "history"), column="history", kind=list) or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RowRejected("schema", "history is not a list of [question, answer] strings")
        history += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    parts = [columns.get(row, part) for part in ("prompt", "query")]
    if not all(part is None or isinstance(part, str) for part in parts) or not any(parts):
        raise RowRejected("schema", "prompt and query are not strings, or both are empty")
    prompt = "\n".join(part for part in parts if part)
    return _with_system(row, columns, [*history, {"role": "user", "content": prompt}]), prompt


def _sharegpt(row: Row, columns: Columns) -> Parts:
    messages = read_messages(columns.get(row, "conversations"), what="conversations", columns=columns)
    if messages[-1]["role"] == "assistant":
        raise RowRejected("schema", "conversations ends with the assistant: chosen and rejected cannot follow")
    return *_with_answers(row, columns, _with_system(row, columns, messages)), None


def _dialogue(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt") or ""
    sides = [columns.get(row, side) for side in ("chosen", "rejected")]
    if not all(isinstance(text, str) for text in (prompt, *sides)):
        raise RowRejected("schema", "a dialogue is not a string")
    (history, chosen, head), (other_history, rejected, other_head) = (_split_dialogue(prompt + text) for text in sides)
    if history != other_history:
        raise RowRejected("prompt_mismatch", "the two dialogues differ before their last answer")
    text = PlainText(prompt=head, chosen=(prompt + sides[0])[len(head) :], rejected=(prompt + sides[1])[len(other_head) :])
    return history, chosen, rejected, text


READERS: dict[str, Callable[[Row, Columns], Parts]] = {
    "implicit_prompt": _implicit_prompt,
    "explicit_prompt": _explicit_prompt,
    "alpaca": _alpaca,
    INSTRUCTION: _alpaca_instruction,
    "sharegpt": _sharegpt,
    "dialogue": _dialogue,
}

# The parts that each format reads beside the answers and the optional ones.
FORMAT_PARTS: dict[str, tuple[str, ...]] = {
    "implicit_prompt": (),
    "explicit_prompt": ("prompt", "system"),
    "alpaca": ("prompt", "query", "system", "history"),
    INSTRUCTION: ("prompt", "query", "system", "history", "response"),
    "sharegpt": ("conversations", "system"),
    "dialogue": ("prompt",),
}

# Where one format alone is allowed: of each line, one part needs a column.
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
    if history[0]["role"] == "system":
        raise RowRejected("schema", "the row has a system column and a system message")
    return [{"role": "system", "content": system}, *history]


def _with_answers(row: Row, columns: Columns, history: list[Message]) -> tuple[list[Message], Message, Message]:
    chosen, rejected = (answer_message(columns.get(row, side), what=side, columns=columns) for side in ("chosen", "rejected"))
    return history, chosen, rejected


def _plain_text(row: Row, columns: Columns, prompt: str) -> PlainText | None:
    chosen, rejected = columns.get(row, "chosen"), columns.get(row, "rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return PlainText(prompt=prompt, chosen=chosen, rejected=rejected)
    return None
