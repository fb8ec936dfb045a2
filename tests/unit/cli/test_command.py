"""What every command does with a user's error and with Ctrl-C."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax.cli.command import STOPS, Group, Parser, run_command, string_map
from relax.errors import UserError


@pytest.fixture(autouse=True)
def signals():
    """The handlers of this process, which only a command may lose."""
    handlers = [signal.getsignal(kind) for kind in STOPS]
    yield
    for kind, handler in zip(STOPS, handlers, strict=True):
        signal.signal(kind, handler)


def test_a_users_error_is_one_line_on_rank_0_and_exit_code_2(monkeypatch, capsys):
    def wrong() -> None:
        raise UserError("--lr -1: must be at least 0")

    for rank, told in (("0", "relax: error: --lr -1: must be at least 0\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            run_command(wrong)
        assert caught.value.code == 2
        assert capsys.readouterr().err == told


def test_a_name_that_no_file_can_have_is_the_users_error(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(lambda: Path("x" * 5000).stat())
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"relax: error: {'x' * 200}: no file has a name this long; check the paths given\n"


def test_an_interrupt_before_training_exits_quietly_with_130(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_command(interrupted)
    assert caught.value.code == 130
    assert capsys.readouterr().err == ""


def test_a_defect_keeps_its_traceback():
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(broken)


@pytest.mark.parametrize("end", ["", "sys.exit(7)", "raise UserError('no')", "1 / 0"])
def test_a_signal_at_the_very_end_changes_nothing(end):
    """While the interpreter is taken down it has no handlers any more: an object that dies last sends the signals."""
    text = f"""
import signal, sys
from relax.cli.command import STOPS, Group, Parser, run_command, string_map
from relax.errors import UserError
class Late:
    def __del__(self, kinds=STOPS, send=signal.raise_signal):
        for kind in kinds: send(kind)
sys.late = Late()
def main():
    for kind in STOPS: signal.signal(kind, lambda number, frame: None)
    {end}
run_command(main)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == {"": 0, "sys.exit(7)": 7, "1 / 0": 1}.get(end, 2), done.stderr


def test_what_the_terminal_cannot_show_is_shown_otherwise(monkeypatch):
    """A file's name need not be text, and a terminal need not know every letter."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    run_command(lambda: print("é 名 half\udcff", flush=True))
    assert shown.getvalue() == b"\xe9 \\u540d half\\udcff\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--count=--"], "--count: expected a value, not --"),
        (["--count", "9" * 5_000], f"--count: must be a whole number, at least 1, not '{'9' * 332}"),
        (["--count", "1" + "0" * 399], f"--count: must be a whole number, at least 1, not '1{'0' * 331}"),
        (["--names", "[" * 100_000], f"--names: must be a JSON object, but '{'[' * 354}"),
        (["--place", "a" * 5_000], f"--place: '{'a' * 390}"),
        (["--place", "a\0b"], r"--place: 'a\x00b' cannot be a path: it holds a NUL character"),
        (["--place", "loop"], "--place: 'loop' cannot be a path: Too many levels of symbolic links"),
        (["--place", "loop/below"], "--place: 'loop/below' cannot be a path: Too many levels of symbolic links"),
    ],
)
def test_a_value_that_nothing_can_be_is_told_in_one_short_message(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    parser = Parser()
    group = Group(parser, "flags")
    group.whole("--count", None, "help")
    group.json("--names", string_map, "help")
    group.directory("--place", "help")
    with pytest.raises(UserError) as caught:
        parser.parse(line)
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 450


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("gloo: Timed out waiting 60000ms for recv", "another rank did not answer within --distributed-timeout-minutes"),
        ("gloo: Connection closed by peer [127.0.0.1]", "another rank ended first (Connection closed by peer)"),
    ],
)
def test_a_rank_whose_peer_is_gone_says_so_in_one_line(monkeypatch, capsys, problem, told):
    def lost() -> None:
        raise RuntimeError(problem)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    run_command(lost)
    assert ended == [3] and capsys.readouterr().err == f"relax: rank 1 stopped: {told}\n"
