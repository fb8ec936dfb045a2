"""Directories for what is not complete yet: gone at the end, gone after a kill, and never while their writer lives."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from relax.data import scratch
from relax.data.scratch import scratch_directory, whole_file
from relax.data.seen import SeenRows

KILLED = """
import os, signal, sys
from pathlib import Path
from relax.data.scratch import scratch_directory
with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "tokens").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_scratch_directory_is_removed_whatever_happens(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error), scratch_directory(tmp_path / "new" / "entry") as directory:
        assert directory.parent == tmp_path / "new" and directory.name.startswith(".entry.")
        (directory / "file").write_text("x")
        raise error
    assert names(tmp_path / "new") == []


def test_what_was_renamed_stays(tmp_path: Path):
    with scratch_directory(tmp_path / "entry") as directory:
        directory.rename(tmp_path / "entry")
    assert names(tmp_path) == ["entry"]


def test_a_killed_writers_directory_is_removed_by_the_next_one(tmp_path: Path):
    (tmp_path / ".git").mkdir()
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a")], check=False)
    assert done.returncode == -9 and len(names(tmp_path)) == 2
    with scratch_directory(tmp_path / "b") as directory:
        assert sorted(names(tmp_path)) == sorted([directory.name, ".git"])


def test_a_living_writers_directory_stays(tmp_path: Path):
    with scratch_directory(tmp_path / "a") as first, scratch_directory(tmp_path / "a") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_a_directory_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock, removed = scratch._lock, []

    def removed_first(descriptor: int) -> bool | None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        return lock(descriptor)

    monkeypatch.setattr(scratch, "_lock", removed_first)
    with scratch_directory(tmp_path / "a") as directory:
        assert list(tmp_path.iterdir()) == [directory] != removed


def test_nothing_is_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    with scratch_directory(tmp_path / "a") as first, scratch_directory(tmp_path / "a") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert names(tmp_path) == []


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path):
    target = tmp_path / "new" / "report.json"
    for text in ("first", "second"):
        with whole_file(target) as stream:
            stream.write(text)
            assert target.exists() == (text == "second"), "an older one keeps the name"
        assert target.read_text() == text
    with pytest.raises(KeyboardInterrupt), whole_file(target) as stream:
        stream.write("third")
        raise KeyboardInterrupt
    assert target.read_text() == "second" and names(target.parent) == ["report.json"]


def test_two_processes_with_one_pid_write_one_file(tmp_path: Path):
    """Containers share a directory and each has its own process 7: names beside the file must not come from the pid."""
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write("first")
        second.write("second")
        assert len(names(tmp_path)) == 2
    assert (tmp_path / "a").read_text() == "first" and names(tmp_path) == ["a"]


def test_the_longest_name_that_a_file_system_takes_is_written(tmp_path: Path):
    with whole_file(tmp_path / ("a" * 255)) as stream:
        stream.write("x")
    assert names(tmp_path) == ["a" * 255]


def test_a_whole_file_does_not_follow_a_link(tmp_path: Path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "precious")
    with whole_file(tmp_path / "a") as stream:
        stream.write("new")
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "a").is_symlink()


def test_seen_rows_keep_the_first_row_of_every_key():
    seen = SeenRows()
    assert seen.first([b"a", b"1"], 7) is None
    assert seen.first([b"b", b"1"], 8) == 7  # b is not remembered: its row was refused
    assert seen.first([b"b"], 9) is None
    assert (seen.first([b"a"], 10), seen.first([b"b", b"x"], 11)) == (7, 9)
