"""Reads a pickle as data: what it would import, call and build becomes inert records.

Nothing is imported, called or set: a name stays text, a call is a record of its name and arguments, and a state is kept
beside it. There is no opcode that could reach a class of this process, so there is nothing to restrict. Known are the
opcodes that pickle's protocols 2 to 5 write for plain values and objects; any other one is an error, as is a name that
the reader does not expect.

pickle's own reader would also let a file of ten bytes claim all memory (the index of its memo); here a length is checked
against the bytes that are left.
"""

import struct
from collections.abc import Callable, Collection
from pickle import UnpicklingError
from typing import Any

LONGEST_INTEGER = 8  # bytes: sizes and offsets


class UnknownName(UnpicklingError):
    """A pickle asks for something that its reader does not expect; the message is the dotted name."""


class Name(str):
    """What a pickle would import, as "module.name"."""


class Record:
    """What a pickle would make by calling `name` with `args`, and the state that it would then set."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


def parse(data: bytes, names: Collection[str]) -> Any:
    """The value: plain values, `Name`s and `Record`s. UnknownName for a name outside `names`, else UnpicklingError."""
    return _Machine(data, names).run()


class _Machine:
    def __init__(self, data: bytes, names: Collection[str]) -> None:
        self.data, self.at, self.names = data, 0, names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self.data
        try:
            while (code := data[self.at]) != _STOP:
                self.at += 1
                _OPCODES[code](self)
            return self.stack.pop()
        except KeyError:
            raise UnpicklingError(f"byte {self.at}: unknown opcode or memo {data[self.at - 1]:#04x}") from None
        except (IndexError, struct.error):
            raise UnpicklingError(f"byte {self.at}: it ends early, or takes what is not there") from None
        except (TypeError, ValueError) as error:
            raise UnpicklingError(f"byte {self.at}: {error}") from None

    def take(self, size: int) -> bytes:
        taken = self.data[self.at : self.at + size]
        if len(taken) != size:
            raise IndexError
        self.at += size
        return taken

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError(f"{type(self.stack[-1]).__name__} instead of {kind.__name__}")
        return self.stack[-1]

    def pop(self, kind: type) -> Any:
        self.top(kind)
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        first = self.marks.pop()
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def proto(self) -> None:
        if not 2 <= self.number(_U1) <= 5:
            raise TypeError("another protocol")

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def long(self) -> None:
        if (size := self.number(_U1)) > LONGEST_INTEGER:
            raise TypeError(f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def text(self, length: struct.Struct) -> None:
        self.stack.append(self.take(self.number(length)).decode())

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        self.stack[-count:] = [items]

    def tuple_since_mark(self) -> None:
        self.stack.append(tuple(self.since_mark()))

    def append(self) -> None:
        item = self.stack.pop()
        self.top(list).append(item)

    def appends(self) -> None:
        items = self.since_mark()
        self.top(list).extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_pairs([key], [value])

    def set_items(self) -> None:
        items = self.since_mark()
        self.set_pairs(items[::2], items[1::2])

    def set_pairs(self, keys: list[Any], values: list[Any]) -> None:
        for key in keys:  # the hash of a tuple in a tuple in a tuple ... would overflow the stack
            if type(key) not in _KEYS:
                raise TypeError(f"a key of type {type(key).__name__}")
        self.top(dict).update(zip(keys, values, strict=True))

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def import_lines(self) -> None:
        self.import_name(self.line(), self.line())

    def import_stack(self) -> None:
        name, module = self.pop(str), self.pop(str)
        self.import_name(module, name)

    def import_name(self, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        if dotted not in self.names:
            raise UnknownName(dotted if dotted.isprintable() and len(dotted) < 200 else ascii(dotted)[:200])
        self.stack.append(Name(dotted))

    def call(self) -> None:
        args, name = self.pop(tuple), self.pop(Name)
        self.stack.append(Record(name, args))

    def build(self) -> None:
        state, made = self.stack.pop(), self.top(Record)
        if made.state is not None:
            raise TypeError("a second state")
        made.state = state

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, form: struct.Struct) -> None:
        self.memo[self.number(form)] = self.stack[-1]

    def get(self, form: struct.Struct) -> None:
        self.stack.append(self.memo[self.number(form)])


def _push(value: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value())


def _number(form: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(machine.number(form))


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP, _KEYS = ord("."), (str, int, Record)
_OPCODES: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.proto,
    0x95: lambda machine: machine.number(_U8),  # FRAME: how much to read ahead
    ord("("): _Machine.mark,
    ord("N"): _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    ord(")"): _push(tuple),
    ord("]"): _push(list),
    ord("}"): _push(dict),
    ord("K"): _number(_U1),
    ord("M"): _number(_U2),
    ord("J"): _number(_I4),
    ord("G"): _number(_F8),
    0x8A: _Machine.long,
    0x8C: lambda machine: machine.text(_U1),
    ord("X"): lambda machine: machine.text(_U4),
    0x8D: lambda machine: machine.text(_U8),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): _Machine.tuple_since_mark,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("c"): _Machine.import_lines,
    0x93: _Machine.import_stack,
    ord("R"): _Machine.call,
    0x81: _Machine.call,
    ord("b"): _Machine.build,
    0x94: _Machine.memoize,
    ord("q"): lambda machine: machine.put(_U1),
    ord("r"): lambda machine: machine.put(_U4),
    ord("h"): lambda machine: machine.get(_U1),
    ord("j"): lambda machine: machine.get(_U4),
}
