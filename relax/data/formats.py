"""Row formats: detect one per file, then read every row of the file as that format.

| format | rows |
| --- | --- |
| implicit_prompt | `chosen`, `rejected`: message lists with the same history |
| explicit_prompt | `prompt` (string or messages) + `chosen`, `rejected` (each a string, message, or one-message list) |
| alpaca | `prompt` and/or `query` strings, `system`, `history` [[question, answer], ...] + `chosen`, `rejected` |
| ranking | a prompt as in either + `completions` in a list, with `ranks` or `ratings` |
| unpaired | a prompt as in either + one `completion`, of which a column such as `label` says something |
| sharegpt | `conversations` with from/value + `chosen`, `rejected` |
| alpaca_instruction | as alpaca with one `response`; read only where it is asked for |
| dialogue | `\\n\\nHuman: ...\\n\\nAssistant: ...` strings, whole or behind a `prompt` |

A file has the format that most of its sampled rows have. The first four are names of one reading, explicit_prompt, whose rows
may stand in one file: it is called alpaca where rows fill query, system or history.

Invariants: how a row is read depends on the row and its file's format, never on which row comes first; a row of another
format than its file's is refused as `schema`, never read some other way; a column that a row's reader did not read is not
counted as used. No row's prompt ends with the assistant.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from relax.data.columns import COLUMNS, Columns, parse_boolean
from relax.data.completions import Completions, read_completions, read_instruction
from relax.data.detection import OTHER_GROUPS, format_of, reading
from relax.data.dialogue import is_dialogue, split_dialogue
from relax.data.messages import clean_row, read_messages
from relax.data.options import INSTRUCTION, DataOptions
from relax.data.rows import Group, Message, PlainText, Row, RowRejected, describe, parse_json_column, shown


class Parts(NamedTuple):
    """A format's reading of a row: what comes before the completions, these best first, their ranks where some are tied, the
    plain text where the format is plain text, and each completion's own history where they are not the same.
    """

    history: list[Message]
    completions: tuple[Message, ...]
    ranks: tuple[int, ...] = ()
    text: PlainText | None = None
    histories: tuple[list[Message], ...] = ()


def read_group(row: Any, *, name: str, columns: Columns, options: DataOptions) -> Group:
    """Read one row as the file's format; `columns.used` says what of it. Raises `RowRejected`."""
    if not isinstance(row, dict):
        raise RowRejected("schema", f"the row is {'null' if row is None else describe(row)}, not an object")
    row = clean_row(row, columns)
    own = None if name == INSTRUCTION else format_of(row, columns)
    if own not in OTHER_GROUPS:
        for side in ("response",) if name == INSTRUCTION else ("chosen", "rejected"):
            if columns.get(row, side) is None:
                raise RowRejected("schema", f"{side} is missing")
    if own and reading(own) != reading(name):
        raise RowRejected("schema", f"the row is {own}, and most rows of its file are {name}")
    if own in OTHER_GROUPS and options.row_formats:
        raise RowRejected("schema", f"the row is {own}, and tokenized files hold pairs")
    columns.used.clear()  # what finding the format looked at, reading it may leave alone
    parts = READERS[name](row, columns)
    history, *histories = (_with_system_prompt(side, options) for side in (parts.history, *parts.histories))
    for messages in (history, *histories):
        if messages and messages[-1]["role"] == "assistant":
            raise RowRejected(
                "schema", "the prompt ends with the assistant's own words: put them at the start of both answers instead"
            )
    return Group(
        history=tuple(history),
        completions=parts.completions,
        ranks=parts.ranks or _tied(row, columns, parts),
        histories=tuple(map(tuple, histories)),
        text=None if options.system_prompt else parts.text,
        tools=parse_json_column(columns.get(row, "tools"), column="tools", kind=list),
        template_kwargs=parse_json_column(columns.get(row, "chat_template_kwargs"), column="chat_template_kwargs", kind=dict)
        or {},
        columns=_numbers(row, columns, options, single=len(parts.completions) == 1),
        pair_id=_pair_id(row, columns),
    )


def _tied(row: Row, columns: Columns, parts: Parts) -> tuple[int, ...]:
    """The ranks of a row whose two completions its `tie` says to be equally good."""
    if len(parts.completions) != 2 or (tie := columns.get(row, "tie")) is None:
        return ()
    return (1, 1) if parse_boolean(tie, what="tie") else ()


def _numbers(row: Row, columns: Columns, options: DataOptions, *, single: bool) -> dict[str, float]:
    """The row's numbers that the objective reads."""
    found = {
        column.name: column.parse(columns.get(row, column.name))
        for column in COLUMNS.values()
        if (column.always or column.name in options.reads) and (single or not column.single)
    }
    return {name: number for name, number in found.items() if number is not None}


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
    histories = tuple(_with_system(row, columns, messages[:-1]) for messages in sides.values())
    completions = sides["chosen"][-1], sides["rejected"][-1]
    return Parts(histories[0], completions, histories=histories if histories[0] != histories[1] else ())


def _refuse_unanswered(sides: dict[str, list[Message]]) -> None:
    """Raise `RowRejected` where one side is only the beginning of the other: nothing is left that answers."""
    (chosen, first), (rejected, second) = sides.items()
    for side, short, long in ((chosen, first, second), (rejected, second, first)):
        if len(short) < len(long) and long[: len(short)] == short:
            raise RowRejected("empty_completion", f"{side} is only the beginning of the other side, with no answer of its own")


def _explicit_prompt(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt")
    if isinstance(prompt, list | dict):
        return _with_completions(row, columns, read_messages(prompt, what="prompt", columns=columns))
    if isinstance(prompt, str) and is_dialogue(prompt):
        raise RowRejected("schema", "a dialogue as one string goes with chosen and rejected: give the prompt as messages")
    history, question = _question(row, columns)
    return _parts(history, read_completions(row, columns), question)


def _alpaca_instruction(row: Row, columns: Columns) -> Parts:
    history, question = _question(row, columns)
    return _parts(history, read_instruction(row, columns), question)


def _parts(history: list[Message], found: Completions, question: str) -> Parts:
    """The parts of a row whose history ends with a question as text."""
    plain = PlainText(question, found.texts) if len(history) == 1 and found.texts is not None else None
    return Parts(history, found.messages, found.ranks, text=plain)


def _with_completions(row: Row, columns: Columns, history: list[Message]) -> Parts:
    """The parts of a row whose history is messages."""
    history = _with_system(row, columns, history)
    found = read_completions(row, columns)
    return Parts(history, found.messages, found.ranks)


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
    return _with_completions(row, columns, messages)


def _dialogue(row: Row, columns: Columns) -> Parts:
    prompt = columns.get(row, "prompt") or ""
    sides = [columns.get(row, side) for side in ("chosen", "rejected")]
    if not all(isinstance(text, str) for text in (prompt, *sides)):
        raise RowRejected("schema", "a dialogue is not a string")
    wholes = [prompt + text for text in sides]
    (history, chosen, head), (other_history, rejected, other_head) = map(split_dialogue, wholes)
    _refuse_unanswered({"chosen": [*history, chosen], "rejected": [*other_history, rejected]})
    if history != other_history:
        raise RowRejected("prompt_mismatch", "the two dialogues differ before their last answer")
    text = PlainText(head, (wholes[0][len(head) :], wholes[1][len(other_head) :]))
    return Parts(history, (chosen, rejected), text=text)


READERS: dict[str, Callable[[Row, Columns], Parts]] = {
    "implicit_prompt": _implicit_prompt,
    **dict.fromkeys(("explicit_prompt", "alpaca", *OTHER_GROUPS), _explicit_prompt),
    INSTRUCTION: _alpaca_instruction,
    "sharegpt": _sharegpt,
    "dialogue": _dialogue,
}

# The parts that each format reads beside chosen, rejected and the optional ones.
FORMAT_PARTS: dict[str, tuple[str, ...]] = {
    "implicit_prompt": ("system",),
    "explicit_prompt": ("prompt", "query", "system", "history"),
    "alpaca": ("prompt", "query", "system", "history"),
    INSTRUCTION: ("prompt", "query", "system", "history", "response"),
    "sharegpt": ("conversations", "system"),
    "dialogue": ("prompt",),
}


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
