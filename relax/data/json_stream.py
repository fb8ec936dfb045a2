"""JSON as files of rows hold it: a whole value, or an array read one element at a time, never held as a whole.

Invariants: elements come in order with the line each starts on, from 1; memory holds one block and one element; text
that is not a JSON array raises `UserError` with file and line. No value is nested more than `MAX_DEPTH` levels, so that
whatever walks through a row later may recurse.
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

from relax.errors import UserError

BLOCK_CHARS = 1 << 20
MAX_DEPTH = 100
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_DECODER = json.JSONDecoder()
_BLANK = " \t\r\n"


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` that says what is wrong, whatever the text."""
    try:
        value = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not usable JSON: {refusal(error)}") from None
    if is_deep(value):
        raise ValueError(f"not usable JSON: {TOO_DEEP}")
    return value


def refusal(error: ValueError | RecursionError) -> str:
    """Why Python's reader refuses valid JSON: its depth, or an integer longer than Python converts."""
    return TOO_DEEP if isinstance(error, RecursionError) else f"{error}".partition(";")[0]


def is_deep(value: Any) -> bool:
    """Whether lists and objects are nested beyond `MAX_DEPTH`."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner = (entry for outer in level for entry in (outer.values() if isinstance(outer, dict) else outer))
        level = [entry for entry in inner if isinstance(entry, list | dict)]
        if not level:
            return False
    return True


class ArrayReader:
    """Iterates over (line, element) of the array in `stream`, a text file at its start; `name` is for messages."""

    def __init__(self, stream: TextIO, *, name: str) -> None:
        self._stream = stream
        self._name = name
        self._buffer = ""
        self._position = 0
        self._line = 1
        self._ended = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        self._expect("[")
        if self._peek() != "]":
            while True:
                self._peek()
                yield self._line, self._element()
                if self._peek() != ",":
                    break
                self._position += 1
        self._expect("]")
        if self._peek():
            raise self._error("text after the end of the array")

    def _element(self) -> Any:
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                if not self._read():
                    raise self._error(f"{error.msg} in the element that begins here") from None
                continue
            except (ValueError, RecursionError) as error:
                raise self._error(f"{refusal(error)}, in the element that begins here", kind="usable") from None
            # A number at the end of the block may go on in the next one.
            if end == len(self._buffer) and self._read():
                continue
            if is_deep(value):
                raise self._error(f"{TOO_DEEP}, in the element that begins here", kind="usable")
            self._advance(end)
            return value

    def _peek(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            end = self._position
            while end < len(self._buffer) and self._buffer[end] in _BLANK:
                end += 1
            self._advance(end)
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read():
                return ""

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"{character!r} expected")
        self._position += 1

    def _advance(self, end: int) -> None:
        self._line += self._buffer.count("\n", self._position, end)
        self._position = end

    def _read(self) -> bool:
        """One more block behind what is left of the buffer; as much again, so that a long element costs linear time."""
        rest = self._buffer[self._position :]
        block = "" if self._ended else self._stream.read(max(BLOCK_CHARS, len(rest)))
        self._ended = not block
        self._buffer, self._position = rest + block, 0
        return bool(block)

    def _error(self, what: str, *, kind: str = "valid") -> UserError:
        return UserError(f"{self._name}:{self._line}: not {kind} JSON: {what}")
