"""Messages as rows hold them -> messages as chat templates read them (`role`, `content`, and whatever else they carry).

Invariants: every message returned has a string role and string content; further fields (tool calls, reasoning) are kept.
A row means the same however its file writes it: messages as text are messages, null, NaN and absent fields are one, and
a tool call's arguments as text are the object that the text is.
"""

import re
from functools import lru_cache
from typing import Any

from relax.data.columns import EMPTY, OPTIONAL_PARTS, ROLES, Columns
from relax.data.json_stream import load_json
from relax.data.rows import Message, Row, RowRejected, describe, parse_json_column, shown, without_missing

# The parts that may be messages.
MESSAGE_PARTS = ("prompt", "chosen", "rejected", "completion", "response", "conversations")
_OTHER_ROLES = ("developer", "function", "model", "bot")


def clean_row(row: Row, columns: Columns) -> Row:
    """The row without what is null, NaN or empty, its text that is messages read. Raises `RowRejected`."""
    row = without_missing(row)
    for part in OPTIONAL_PARTS:
        name = columns.names.get(part)
        if name in row and row[name] in EMPTY:
            del row[name]
    for part in MESSAGE_PARTS:
        name = columns.names.get(part)
        if name is not None and isinstance(text := row.get(name), str) and text.lstrip()[:1] in ("[", "{"):
            row[name] = _read_text(text, what=name, columns=columns)
    return row


def _read_text(text: str, *, what: str, columns: Columns) -> Any:
    """The messages that a text is, or the text. Raises `RowRejected` for what was messages before it became text."""
    fields = frozenset(name for name, field in {**columns.fields, "role": "role"}.items() if field == "role")
    roles = frozenset({*ROLES, *_OTHER_ROLES, *columns.roles})
    if not _begins_messages(fields, roles).match(text):
        return text
    try:
        value = load_json(text)
    except ValueError:
        raise RowRejected("schema", f"{what} holds messages as text that is not JSON: write them as JSON") from None
    messages = value if isinstance(value, list) else [value]
    objects = all(isinstance(message, dict) for message in messages)
    if objects and any(str(message.get(field)) in roles for message in messages for field in fields):
        return without_missing(value)
    return text


@lru_cache(maxsize=16)
def _begins_messages(fields: frozenset[str], roles: frozenset[str]) -> re.Pattern[str]:
    """Text of an object, or a list of them, in which a field of these names, in quotes, has one of these roles."""
    field, role = ("|".join(map(re.escape, sorted(words))) for words in (fields, roles))
    return re.compile(rf"""\s*(?:\[\s*)?\{{.*?['"](?:{field})['"]\s*:\s*['"](?:{role})['"]""", re.DOTALL)


def read_messages(value: Any, *, what: str, columns: Columns) -> list[Message]:
    """A non-empty message list. Raises `RowRejected`; `what` names the column in the message."""
    if value is None or value == []:
        raise RowRejected("schema", f"{what} is empty")
    if not isinstance(value, list):
        raise RowRejected("schema", f"{what} is {describe(value)}, not a list of messages")
    return [read_message(message, what=what, columns=columns) for message in value]


def completion_message(value: Any, *, what: str, columns: Columns) -> Message:
    """One completion of the assistant's given as a string, a message, or a list of one message. Raises `RowRejected`."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if value == []:
        raise RowRejected("empty_completion", f"{what} is empty")
    if isinstance(value, list):
        if len(value) != 1:
            raise RowRejected("schema", f"{what} holds {len(value)} messages beside a prompt; it must hold one answer")
        value = value[0]
    message = read_message(value, what=what, columns=columns)
    if message["role"] != "assistant":
        raise RowRejected("schema", f"{what} has role {shown(message['role'])}, not assistant")
    return message


def read_message(value: Any, *, what: str, columns: Columns) -> Message:
    """One message with fields and role renamed, and text parts joined. Raises `RowRejected`."""
    if not isinstance(value, dict):
        raise RowRejected("schema", f"{what} holds {describe(value)} where a message should be")
    message: Message = {columns.fields.get(str(name), str(name)): field for name, field in value.items()}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowRejected("schema", f"a message of {what} has no role")
    message["role"] = columns.roles.get(role, role)
    message["content"] = _text(message.get("content"), what=what)
    if calls := parse_json_column(message.get("tool_calls"), column=f"tool_calls of {what}", kind=list):
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    return message


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are the object that their text is; other calls as they are."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = load_json(arguments)
    except ValueError:
        return call
    return {**call, "arguments": without_missing(value)} if isinstance(value, dict) else call


def _text(content: Any, *, what: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise RowRejected("schema", f"a message of {what} has content that is not text ({describe(content)})")
