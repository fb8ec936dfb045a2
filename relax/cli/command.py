"""What all commands share: value types that state their rule, a strict parser, and the exit code of a user's error.

Invariants:
- A value out of range dies while parsing, in one message that names the flag, the rule and the value.
- An unknown flag is an error that names the nearest known one; no flag may be shortened.
- A `UserError` is printed once, on rank 0, without a traceback, and the process exits with code 2 on every rank.
- A rank whose connection to another one broke says so in one line: the reason is that one's.
- A signal that comes when the work is done no longer changes the exit code.
"""

import argparse
import difflib
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from relax.errors import UserError

N = TypeVar("N", int, float)

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # they end a run in order
LONG = 400  # characters of a value that a message repeats
LOST = 3  # exit code of a rank whose connection to another one broke; `relax.launch` looks for the rank behind it
SILENT = "Timed out waiting"  # in gloo's error
BROKEN = ("Connection closed by peer", "Connection reset by peer", "Connection was likely closed", "Broken pipe", SILENT)


def run_command(main: Callable[[], object]) -> None:
    """Run a command's `main`; a `UserError` becomes `relax: error: ...` on rank 0's standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name or a row may hold what the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        _call(main)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"relax: error: {error}", file=sys.stderr, flush=True)
        else:  # torchrun stops every rank when the first ends: let rank 0 speak
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        sys.exit(2)
    except RuntimeError as error:
        broken = [sign for sign in BROKEN if sign in str(error)]
        if not broken:
            raise
        rank, sign = os.environ.get("RANK", "0"), broken[0]
        what = f"another rank ended first ({sign})"
        if sign == SILENT:
            what = "another rank did not answer within --distributed-timeout-minutes"
        print(f"relax: rank {rank} stopped: {what}", file=sys.stderr, flush=True)
        time.sleep(1)  # the exit code that counts is the other one's: let it end first
        os._exit(LOST)  # a broken process group cannot be taken down in order
    except KeyboardInterrupt:  # before the run listens for signals itself: nothing has been trained yet
        sys.exit(128 + signal.SIGINT)
    finally:
        ignore_stops()


def _call(main: Callable[[], object]) -> None:
    """Run `main`. A name that no file system takes is the user's error, whichever flag gave it."""
    try:
        main()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{str(error.filename)[:200]}: no file has a name this long; check the paths given") from None
        raise


def ignore_stops() -> None:
    """For a process that only exits from here on: while the interpreter is taken down a handler is none, and a signal kills."""
    for kind in STOPS:
        signal.signal(kind, signal.SIG_IGN)


class HelpFormatter(argparse.HelpFormatter):
    """Wide columns, and `(default: ...)` after every help text whose flag has a default worth naming."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=min(shutil.get_terminal_size().columns, 120))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default is None or action.default in ([], {}, argparse.SUPPRESS)
        if silent or not action.option_strings or action.nargs == 0 or "default:" in text:
            return text
        return f"{text} (default: %(default)s)"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = action.metavar
        if action.nargs == argparse.ONE_OR_MORE and isinstance(metavar, str):
            return metavar if metavar.startswith("[") else f"{metavar} ..."  # argparse would repeat the word
        return super()._format_args(action, default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)  # a flag stays whole


class Parser(argparse.ArgumentParser):
    """Raises `UserError` instead of exiting, for what argparse finds wrong and for unknown flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with argparse's message, the flag first."""
        message = message.removeprefix("argument ")
        raise UserError(message if len(message) <= LONG else f"{message[:LONG]} ... ({len(message):,} characters)")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse all of `argv` (default: the process's); `UserError` for an argument that no flag takes."""
        for argument in sys.argv[1:] if argv is None else argv:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse would make an empty list of it
                raise UserError(f"{argument.removesuffix('=--')}: expected a value, not --")
        known, extras = self.parse_known_args(argv)
        unknown = [extra for extra in extras if extra.startswith("-")]
        if unknown:
            raise UserError(self._unknown(unknown[0].partition("=")[0]))
        if extras:
            raise UserError(f"unexpected argument {extras[0]!r}: no flag takes it; see --help")
        return known

    def _unknown(self, flag: str) -> str:
        flags = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
        return f"unknown flag {flag}: " + (f"did you mean {near[0]}?" if near else "see --help for all flags")


class EvalData(argparse.Action):
    """Collects `--eval-prompt-data [NAME] PATH` into a dict from name to path."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add one set. A name is part of metric names, so it is one plain word."""
        *names, path = values
        if len(names) > 1:
            parser.error(f"{option_string} takes [NAME] PATH, not {len(values)} values; repeat the flag for each set")
        name = names[0] if names else ""
        if names and (not re.fullmatch(r"[\w.-]+", name) or Path(name).exists()):
            parser.error(f"{option_string} takes [NAME] PATH, and {name!r} is not a plain name; repeat the flag for each set")
        sets = getattr(namespace, self.dest)
        if name in sets:
            which = f"the set {name!r}" if name else "the set without a name"
            parser.error(f"{option_string} gives {which} twice ({sets[name]}, {path}); give each set its own name")
        setattr(namespace, self.dest, {**sets, name: path})


class Group:
    """One titled group of flags, with a verb for each kind of value; each adds one flag."""

    def __init__(self, parser: Parser, title: str) -> None:
        self._group = parser.add_argument_group(title)
        self._add = self._group.add_argument

    def shared(self, source: Parser, *flags: str) -> None:
        """Flags of another command, as they are there."""
        for flag in flags:
            self._group._add_action(source._option_string_actions[flag])

    def switch(self, flag: str, help_: str) -> None:
        """True when given; `--no-x` instead makes `x` False when given."""
        dest = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
        self._add(flag, dest=dest, action="store_false" if flag.startswith("--no-") else "store_true", help=help_)

    def pair(self, flag: str, default: bool, help_: str) -> None:
        """`--x` or `--no-x`."""
        self._add(flag, action=argparse.BooleanOptionalAction, default=default, help=help_)

    def whole(self, flag: str, default: int | None, help_: str, *, at_least: int = 1, at_most: int | None = None) -> None:
        """A whole number."""
        self._add(flag, type=number(int, at_least=at_least, at_most=at_most), default=default, metavar="N", help=help_)

    def real(
        self, flag: str, default: float | None, help_: str, *, above: float | None = None, below: float | None = None
    ) -> None:
        """A finite number `>= 0`, or `> above`, and `< below`."""
        kind = number(float, at_least=0.0 if above is None else None, above=above, below=below)
        self._add(flag, type=kind, default=default, metavar="X", help=help_)

    def text(self, flag: str, default: str | None, help_: str, *, metavar: str = "TEXT") -> None:
        """A string as it is."""
        self._add(flag, default=default, metavar=metavar, help=help_)

    def directory(self, flag: str, help_: str, *, default: Path | None = None) -> None:
        """A `Path` that the system can look for; whether it must exist is checked later."""
        self._add(flag, type=path, default=default, metavar="DIR", help=help_)

    def choice(self, flag: str, choices: Sequence[str], default: str | None, help_: str) -> None:
        """One of a few words."""
        self._add(flag, choices=list(choices), default=default, help=help_)

    def json(self, flag: str, kind: Callable[[str], dict[str, Any]], help_: str) -> None:
        """A JSON object, parsed at once."""
        self._add(flag, type=kind, default={}, metavar="JSON", help=help_)

    def other(self, *flags: str, **options: Any) -> None:
        """Anything else that argparse's `add_argument` can do."""
        self._add(*flags, **options)


def number(
    kind: type[N],
    *,
    at_least: N | None = None,
    above: N | None = None,
    at_most: N | None = None,
    below: N | None = None,
) -> Callable[[str], N]:
    """An argparse type: a finite number within the bounds; the message of a bad value states them all."""
    limits = (("at least", at_least), ("above", above), ("at most", at_most), ("below", below))
    bounds = " and ".join(
        f"{word} {limit if isinstance(limit, int) else format(limit, 'g')}" for word, limit in limits if limit is not None
    )
    rule = f"must be a {'whole ' if kind is int else ''}number" + (f", {bounds}" if bounds else "")

    def parse(text: str) -> N:
        try:
            value = kind(text)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):  # no number, or a whole one beyond every float
            raise argparse.ArgumentTypeError(f"{rule}, not {shown(text)}") from None
        inside = (
            finite
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (at_most is None or value <= at_most)
            and (below is None or value < below)
        )
        if not inside:
            raise argparse.ArgumentTypeError(f"{rule}, not {text if len(text) <= LONG else shown(text)}")
        return value

    return parse


def path(text: str) -> Path:
    """An argparse type: a path that the system can look for, whether or not anything is there."""
    return Path(path_text(text))


def path_text(text: str) -> str:
    """`path`, as the text that it is."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # too long, a link to itself, below a directory that is closed to this user
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be a path: {error.strerror}") from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be a path: it holds a NUL character") from None
    return text


def shown(text: str) -> str:
    """A value as a message repeats it: no more of it than a person reads."""
    return repr(text) if len(text) <= LONG else f"{text[:LONG]!r}... ({len(text):,} characters)"


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, but {shown(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as \'{{"key": "value"}}\', not {shown(text)}')
    return value


def string_map(text: str) -> dict[str, str]:
    """An argparse type: a JSON object whose values are all strings."""
    value = json_object(text)
    for key, item in value.items():
        if not isinstance(item, str):
            raise argparse.ArgumentTypeError(f"must map strings to strings, but {key!r} maps to {item!r}")
    return value
