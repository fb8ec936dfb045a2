"""A chat template that loops, makes gigabytes or reads the clock: bounded, named with its row, and one day for a run."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from relax.data import DataOptions, load_pairs, pipeline, template_guard
from relax.data.template_guard import CLOCK, MAX_MEMORY, TemplateOverrun, computes_powers, reads_clock, settle_date
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError
from tests.unit.data.samples import CHATML, build_tokenizer, chat_row, load, user, write_jsonl

LOOP = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLED = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
SQUARED = "{% set n = namespace(s=99999999) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}{{ n.s }}"
CLOCKED = CHATML.replace("Be helpful", "Today: {{ strftime_now('%d %b %Y %H:%M') }}")
# Past all bounds in a row whose question says so, fine in others.
SOMETIMES = "{% if 'spin' in messages[0]['content'] %}" + LOOP + "{% endif %}" + CHATML


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_guard, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(template_guard, "MAX_MEMORY", 128 << 20)
    monkeypatch.setattr(template_guard, "MAX_CHARS", 1000)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, r"ran for 0\.3 s of processor time without an end"),
        (SQUARED, r"ran for 0\.3 s of processor time without an end"),
        (DOUBLED, r"takes more than 134,217,728 bytes of memory|ran for 0\.3 s"),
        ("{{ 'a' * 10000000000 }}", r"takes more than 134,217,728 bytes of memory"),
        ("{{ '%9999999999d' % 1 }}", r"takes more than 134,217,728 bytes of memory"),
        ("{% set x = [0] * 10000000000 %}", r"takes more than 134,217,728 bytes of memory"),
        ("{{ 'a' * 1001 }}", r"makes 1,001 characters; at most 1,000 are let through"),
        ("{{ 10 ** 10 ** 10 }}", r"computes powers \(\*\*\), which may take for ever"),
    ],
)
def test_a_template_past_the_bounds_ends(tmp_path: Path, impatient: None, template: str, message: str):
    tokenizer = load_tokenizer(build_tokenizer(tmp_path / "tokenizer"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(TemplateOverrun, match=f"^the chat template that was given by argument {message}"):
        tokenizer.apply_chat_template([user("Q")], tokenize=False, chat_template=template)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert tokenizer.apply_chat_template([user("Q")], tokenize=False, chat_template="fine") == "fine"


def test_the_bounds_are_far_from_what_data_need():
    assert (template_guard.MAX_SECONDS, template_guard.MAX_CHARS, MAX_MEMORY) == (30.0, 64 << 20, 2 << 30)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ 2 ** 8 }}", True),
        ("{% set x = (a)**b %}", True),
        ("{{ f(**kwargs) }}{{ dict(a=1, ** kwargs) }}", False),
        ("**bold** {# 2 ** 8 #}{{ '2 ** 8' }}{% generation %}{% endgeneration %}", False),
        ("{{ broken", False),
    ],
)
def test_powers_are_found_before_they_are_computed(template: str, found: bool):
    assert computes_powers(template) is found


@pytest.mark.parametrize("named", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_never_ends_is_named_before_any_row(tmp_path: Path, impatient: None, named: str):
    directory = build_tokenizer(tmp_path / "tokenizer", template=LOOP)
    if named == "tokenizer_config.json":
        (directory / "chat_template.jinja").unlink()
        config = json.loads((directory / named).read_text())
        (directory / named).write_text(json.dumps({**config, "chat_template": LOOP}))
    with pytest.raises(
        UserError, match=rf"A plain question and answer: the chat template in .*/tokenizer/{named} ran for 0\.3 s"
    ):
        load(write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B")]), directory)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_row_is_named_with_which_a_template_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None, workers: int
):
    monkeypatch.setattr(pipeline, "MIN_ROWS_FOR_POOL", 1)
    template = SOMETIMES
    if workers > 1:  # other processes have the bounds as they are
        template = SOMETIMES.replace(LOOP, "{{ 'a' * 10000000000 }}")
    directory = build_tokenizer(tmp_path / "tokenizer", template=template)
    rows = [chat_row(f"Q{i}", "A", "B") for i in range(9)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows[:6], chat_row("spin", "A", "B"), *rows[6:]])
    with pytest.raises(UserError) as caught:
        load(path, directory, workers=workers)
    bound = "ran for 0.3 s of processor time without an end"
    if workers > 1:
        bound = "takes more than 2,147,483,648 bytes of memory"
    assert str(caught.value) == (
        f"{path}:7: the chat template in {directory}/chat_template.jinja {bound}. Repair the template, or leave the row out."
    )


def test_other_faults_of_a_template_are_still_rows_faults(tmp_path: Path):
    """The sandbox's own bound on ranges raises an error in the row."""
    template = "{% if 'spin' in messages[0]['content'] %}{{ range(1000000000)|list }}{% endif %}" + CHATML
    directory = build_tokenizer(tmp_path / "tokenizer", template=template)
    rows = [chat_row("spin", "A", "B"), chat_row("Q1", "A", "B"), chat_row("Q2", "A", "B")]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), directory).report
    assert len(report.rejected["schema"].rows) == 1 and "Range too big" in report.rejected["schema"].details[0]


def test_reading_data_needs_no_torch_before_a_template_is_rendered():
    code = "import sys, relax.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kwargs", [{"chat_template": CHATML}, {CLOCK: "2026-01-31"}])
def test_a_row_chooses_neither_template_nor_day(tmp_path: Path, kwargs: dict[str, str]):
    directory = build_tokenizer(tmp_path / "tokenizer")
    rows = [chat_row("Q", "A", "B"), chat_row("Q1", "A", "B"), chat_row("Q2", "A", "B", chat_template_kwargs=kwargs)]
    report = load(write_jsonl(tmp_path / "a.jsonl", rows), directory).report
    assert report.rejected["schema"].details == [f"chat_template_kwargs sets {next(iter(kwargs))}"]


def test_a_template_by_argument_is_text():
    with pytest.raises(UserError, match="chat_template must be text"):
        DataOptions(chat_template_kwargs={"chat_template": 5})


def prompt_of(dataset: Any, directory: Path) -> str:
    return str(load_tokenizer(directory).decode(dataset[0].prompt))


@pytest.fixture
def clocked(tmp_path: Path) -> Path:
    return build_tokenizer(tmp_path / "clocked", template=CLOCKED)


def dated(path: Path, directory: Path, today: date | None, **kwargs: str) -> Any:
    return load_pairs(
        [str(path)],
        tokenizer_dir=directory,
        options=DataOptions(chat_template_kwargs=dict(kwargs)),
        cache_dir=path.parent / "cache",
        num_workers=1,
        title="train",
        today=today,
    )


def test_a_template_that_reads_the_clock_is_told_and_its_day_joins_the_identity(tmp_path: Path, clocked: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B")])
    first, second = (dated(path, clocked, date(2026, 12, day)) for day in (7, 8))
    assert "Today: 07 Dec 2026 00:00<" in prompt_of(first, clocked) and "Today: 08 Dec 2026 00:00<" in prompt_of(
        second, clocked
    )
    assert first.fingerprint != second.fingerprint
    assert first.report.notes == (
        "the chat template reads the clock (strftime_now), which stands at 2026-12-07 00:00 for all rows and makes them other "
        "data than those of another day; a new run has the same with --apply-chat-template-kwargs "
        """'{"strftime_now": "2026-12-07"}'""",
    )
    assert first.report.notes[0] in first.report.table()
    again = dated(path, clocked, date(2026, 12, 9), strftime_now="2026-12-07")
    assert again.fingerprint == first.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2, "the given day finds the entry of that day"
    assert f"stands at {date.today()}" in dated(path, clocked, None).report.notes[0]


def test_a_template_without_a_clock_is_the_same_data_every_day(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer")
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B")])
    assert dated(path, directory, date(2026, 12, 7)).report.notes == ()
    dated(path, directory, date(2026, 12, 8))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_clock_is_the_real_one_outside_of_a_render(clocked: Path):
    tokenizer, real = load_tokenizer(clocked), chat_template_utils.datetime
    assert "31 Jan 2026 00:00" in tokenizer.apply_chat_template([user("Q")], tokenize=False, strftime_now="2026-01-31")
    assert chat_template_utils.datetime is real
    assert f"{date.today():%d %b %Y}" in tokenizer.apply_chat_template([user("Q")], tokenize=False)


def test_a_clock_that_transformers_keeps_elsewhere_is_an_error(clocked: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(clocked)
    stock = chat_template_utils._compile_jinja_template

    def compiled_otherwise(text: str) -> Any:
        template = stock(text)
        template.globals["strftime_now"] = lambda form: "noon"
        return template

    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", compiled_otherwise)
    with pytest.raises(UserError, match="the chat template's clock shows noon, not 2026-01-31 00:00"):
        tokenizer.apply_chat_template([user("Q")], tokenize=False, strftime_now="2026-01-31")


def edit_config(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CLOCKED}))


def add_template(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "dated.jinja").write_text(CLOCKED)


@pytest.mark.parametrize("change", [edit_config, add_template])
def test_a_clock_is_found_wherever_the_template_stands(tmp_path: Path, change: Callable[[Path], None]):
    directory = build_tokenizer(tmp_path / "tokenizer")
    assert not reads_clock({}, directory=directory)
    change(directory)
    assert reads_clock({}, directory=directory) and reads_clock({"chat_template": "dated"}, directory=directory)
    assert not reads_clock({"chat_template": CHATML}, directory=directory)
    assert settle_date({"chat_template": CLOCKED}, directory=directory, today=date(2026, 1, 2))[CLOCK] == "2026-01-02"


def test_a_template_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "chat_template.jinja").write_text(CLOCKED)

    def refuse(path: Path, **options: str) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match=r"chat_template\.jinja: cannot be read: Permission denied"):
        reads_clock({}, directory=tmp_path)


@pytest.mark.parametrize("day", ["tomorrow", "2026-13-01", 5])
def test_a_day_that_is_none_is_an_error(tmp_path: Path, day: Any):
    with pytest.raises(UserError, match=r"--apply-chat-template-kwargs: strftime_now is .*: give the day as \"2026-01-31\""):
        settle_date({CLOCK: day}, directory=tmp_path)
