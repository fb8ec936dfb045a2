"""What every command does with a user's error and with Ctrl-C."""

import signal
import subprocess
import sys

import pytest

from relax.command import STOPS, run_command
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
from relax.command import STOPS, run_command
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
