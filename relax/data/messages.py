"""Messages as rows hold them -> messages as chat templates read them (`role`, `content`, and whatever else they carry).

Invariant: every message returned has a string role and string content; further fields (tool calls, reasoning) are kept.
"""

from typing import Any

from relax.data.columns import Columns
from relax.data.rows import Message, RowRejected, describe, parse_json_column


def read_messages(value: Any, *, what: str, columns: Columns) -> list[Message]:
    """A non-empty message list (or its JSON text). Raises `RowRejected`; `what` names the column in the message."""
    messages = parse_json_column(value, column=what, kind=list)
    if not messages:
        raise RowRejected("schema", f"{what} is empty")
    return [read_message(message, what=what, columns=columns) for message in messages]


def answer_message(value: Any, *, what: str, columns: Columns) -> Message:
    """One assistant answer given as a string, a message, or a list of one message. Raises `RowRejected`."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if isinstance(value, list):
        if len(value) != 1:
            raise RowRejected("schema", f"{what} holds {len(value)} messages beside a prompt; it must hold one answer")
        value = value[0]
    message = read_message(value, what=what, columns=columns)
    if message["role"] != "assistant":
        raise RowRejected("schema", f"{what} has role {message['role']!r}, not assistant")
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
    return message


def _text(content: Any, *, what: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise RowRejected("schema", f"a message of {what} has content that is not text ({describe(content)})")
