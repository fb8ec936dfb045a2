"""Whatever ends a run, it closes what it opened: a background save that is under way becomes a checkpoint."""

import time
from pathlib import Path
from typing import Any

import pytest

from relax.backend.checkpoint import store as checkpoint_store
from relax.backend.checkpoint.loading import CheckpointStore
from relax.errors import UserError
from relax.training import run as run_module
from relax.training.run import Run
from tests.checkpoints import file_size_limit, find, found, names, tensors

pytestmark = pytest.mark.usefixtures("one_process")


class Closes:
    """Stands for what else a run opens."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that stands just behind a background save of step 10, whose writing takes a while."""
    write = checkpoint_store.ShardWriter.write

    def slow(self: Any) -> Any:
        time.sleep(0.3)
        return write(self)

    monkeypatch.setattr(checkpoint_store.ShardWriter, "write", slow)
    monkeypatch.setattr(run_module, "shutdown", lambda: None)  # the process group is the tests'
    made = object.__new__(Run)
    made.store = CheckpointStore(tmp_path)
    made.tracker = made.profiler = made.ahead = Closes()
    made.store.save_checkpoint(step=10, state=tensors(10), files={"relax_run.json": {}}, async_save=True)
    assert made.store.pending == 10 and find(tmp_path) is None
    return made


@pytest.mark.parametrize(
    "error", [UserError("the loss is nan"), ValueError("a defect"), MemoryError(), KeyboardInterrupt(), SystemExit(143)]
)
def test_an_error_ends_a_run_only_once_its_checkpoint_is_whole(tmp_path: Path, run: Run, error: BaseException):
    opened = run.tracker
    with pytest.raises(type(error)) as caught, run:
        raise error
    assert caught.value is error
    assert found(tmp_path).step == 10 and run.store.pending is None
    assert names(tmp_path) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert opened.closed == 3 and run.tracker is None


def test_two_errors_are_told_in_one_message(tmp_path: Path, run: Run):
    opened = run.tracker
    with file_size_limit(1000), pytest.raises(UserError) as caught, run:
        raise UserError("the loss is nan")
    assert str(caught.value) == (
        f"the loss is nan; and at the end: --save {tmp_path}: iter_0000010 cannot be saved: File too large; no checkpoint is "
        "there yet. Make room or make the directory writable, then run the same command again"
    )
    assert opened.closed == 3 and names(tmp_path) == []


def test_what_cannot_be_closed_keeps_nothing_else_open(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise OSError("the trace cannot be written")

    monkeypatch.setattr(run.tracker, "close", broken)
    with pytest.raises(OSError), run:
        pass
    assert found(tmp_path).step == 10


def test_a_save_that_another_rank_left_is_said_to_be_lost(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nobody waits for a rank that does not come."""
    monkeypatch.setattr(run_module, "all_come", lambda *, within_seconds: False)
    with pytest.raises(ValueError), run:
        raise ValueError("a defect of this rank")
    assert capsys.readouterr().err == "relax: the checkpoint of step 10 is lost: a rank ended while it was being written\n"
