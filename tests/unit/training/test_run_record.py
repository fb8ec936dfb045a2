"""What a checkpoint's record of its run says of templates is checked before it is used."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.errors import UserError
from relax.training.weight_source import recorded_date, recorded_text


def info(**run: Any) -> Any:
    return SimpleNamespace(path=Path("run/iter_0000001"), run=run)


def test_a_record_is_read():
    assert recorded_text(info(chat_template="{{ a }}"), "chat_template") == "{{ a }}"
    assert recorded_text(info(), "chat_template") is None and recorded_text(info(chat_template=None), "chat_template") is None
    assert recorded_date(info(template_date="2026-01-31")) == date(2026, 1, 31) and recorded_date(info()) is None


@pytest.mark.parametrize("value", [5, ["x"], {}, "x" * 200])
def test_a_damaged_record_is_an_error(value: Any):
    with pytest.raises(UserError, match=r"^run/iter_0000001: relax_run\.json has template_date .{1,80}, which is no "):
        recorded_date(info(template_date=value))
