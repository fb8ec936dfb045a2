"""A chat template is a program from a file: it runs under bounds, and its clock stands still.

Strategy: `guard` puts bounds around a tokenizer's `apply_chat_template`, so that they hold wherever something is rendered:
processor time by a timer's signal, memory by the system's limit on data, the size of a render by its length. Powers are
refused before they are computed, for one of them alone may take hours that no signal ends.

Invariants: a template that loops or makes gigabytes ends in `TemplateOverrun`, which no `except Exception` takes for a
row's fault; outside of a call the process has its own limits, and
no timer runs. A template that reads the clock reads the start
of the day that `CLOCK` among its arguments names, which `settle_date` puts there once for a whole run.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, NoReturn

import jinja2

from relax.errors import UserError

CLOCK = "strftime_now"  # what a template calls to read the clock, and the argument that says which day it reads
MAX_SECONDS = 30.0  # of processor time, for one render
MAX_CHARS = 64 << 20
MAX_MEMORY = 2 << 30  # bytes beyond what the process holds

_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja", "chat_template.json", "tokenizer_config.json")


class TemplateOverrun(BaseException):
    """A template went past the bounds; says which template and which bound. Whoever knows the row adds it."""


def guard(tokenizer: Any) -> None:
    """Bound every later call of the tokenizer's `apply_chat_template`, which also takes `CLOCK` (a date, ISO 8601)."""
    stock = tokenizer.apply_chat_template
    checked: set[str] = set()
    signal.signal(signal.SIGVTALRM, _stop)

    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        day = kwargs.pop(CLOCK, None)
        given = kwargs.get("chat_template")
        name = partial(_name, tokenizer, given)
        for text in _texts(tokenizer.chat_template, given):
            if computes_powers(text):
                raise TemplateOverrun(f"{name()} computes powers (**), which may take for ever: no chat template needs them")
        with _Bounds(name):
            if day is None:
                rendered = stock(*args, **kwargs)
            else:
                with _clock(day):
                    if day not in checked:
                        _check_clock(stock, day)
                        checked.add(day)
                    rendered = stock(*args, **kwargs)
        if isinstance(rendered, str) and len(rendered) > MAX_CHARS:
            raise TemplateOverrun(f"{name()} makes {len(rendered):,} characters; at most {MAX_CHARS:,} are let through")
        return rendered

    tokenizer.apply_chat_template = apply_chat_template


def settle_date(template_kwargs: Mapping[str, Any], *, directory: Path, today: date | None = None) -> dict[str, Any]:
    """The template's arguments, with the day that its clock shows where it reads one: the given day, else today.

    directory: of the tokenizer. Raises `UserError` for a day that is none.
    """
    given = template_kwargs.get(CLOCK)
    if given is not None:
        _parse(given)
    elif reads_clock(template_kwargs, directory=directory):
        return {**template_kwargs, CLOCK: (today or date.today()).isoformat()}
    return dict(template_kwargs)


def reads_clock(template_kwargs: Mapping[str, Any], *, directory: Path) -> bool:
    """Whether the template has a call of the clock in it, by its text. Raises `UserError` for a file that cannot be read."""
    given = str(template_kwargs.get("chat_template") or "")
    if "{" in given:  # else nothing, or the name of one in the directory
        return CLOCK in given
    files = [file for pattern in _FILES for file in directory.glob(pattern) if file.is_file()]
    try:
        return any(CLOCK in file.read_text(encoding="utf-8", errors="replace") for file in files)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def clock_note(template_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The line that tells of a clock; none where nothing reads one."""
    if (day := template_kwargs.get(CLOCK)) is None:
        return ()
    again = json.dumps({CLOCK: day})
    return (
        f"the chat template reads the clock ({CLOCK}), which stands at {day} 00:00 for all rows and makes them other data than "
        f"those of another day; a new run has the same with --apply-chat-template-kwargs '{again}'",
    )


@lru_cache(maxsize=16)
def computes_powers(text: str) -> bool:
    """Whether a template has `**` between two values, not in front of arguments."""
    before = ""
    try:
        for _, kind, value in jinja2.Environment().lex(text):
            if kind == "operator" and value == "**" and before not in ("(", ","):
                return True
            before = before if kind == "whitespace" else value
    except jinja2.TemplateSyntaxError:
        return False  # transformers says what is wrong with it
    return False


def _texts(templates: Any, given: Any) -> list[str]:
    """The templates that a call may use."""
    known = list(templates.values()) if isinstance(templates, dict) else [templates]
    return [str(text) for text in ([given] if given and "{" in str(given) else known) if text]


def _name(tokenizer: Any, given: Any) -> str:
    if given:
        return "the chat template that was given by argument"
    directory = Path(tokenizer.name_or_path)
    file = next(
        (file for file in map(directory.joinpath, ("chat_template.jinja", "tokenizer_config.json")) if file.is_file()), ""
    )
    return f"the chat template in {file or directory}"


class _Bounds:
    """Stops the block when it takes too much processor time or memory."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._kept = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = _data_size() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, self._kept)
        if isinstance(error, _Expired):
            raise TemplateOverrun(f"{self._name()} ran for {MAX_SECONDS:g} s of processor time without an end") from None
        if isinstance(error, MemoryError):
            raise TemplateOverrun(f"{self._name()} takes more than {MAX_MEMORY:,} bytes of memory") from None


class _Expired(TemplateOverrun):
    """The timer's signal came."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Expired(f"the chat template ran for {MAX_SECONDS:g} s of processor time without an end")


def _data_size() -> int:
    """What the system counts against RLIMIT_DATA, in bytes."""
    return int(os.pread(_statm(os.getpid()), 256, 0).split()[5]) * resource.getpagesize()


@lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """The open file of this process's memory figures."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY)


@contextlib.contextmanager
def _clock(day: str) -> Iterator[None]:
    """The clock that transformers' templates read, standing at the start of `day`."""
    from transformers.utils import chat_template_utils  # it loads torch, which not every command needs

    moment = datetime.combine(_parse(day), time())
    kept = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: moment)
    try:
        yield
    finally:
        chat_template_utils.datetime = kept


def _check_clock(render: Any, day: str) -> None:
    """Raise `UserError` where this version of transformers has its clock elsewhere."""
    shown = render([{"role": "user", "content": ""}], tokenize=False, chat_template="{{ strftime_now('%Y-%m-%d %H:%M') }}")
    if shown != f"{day} 00:00":
        raise UserError(
            f"Self-check failed: the chat template's clock shows {shown}, not {day} 00:00. Use another transformers."
        )


def _parse(day: Any) -> date:
    try:
        return date.fromisoformat(day)
    except (TypeError, ValueError):
        raise UserError(f'--apply-chat-template-kwargs: {CLOCK} is {day!r}: give the day as "2026-01-31".') from None
