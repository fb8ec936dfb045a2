"""What every command does with a user's error and with Ctrl-C."""

import pytest

from relax.command import run_command
from relax.errors import UserError


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
