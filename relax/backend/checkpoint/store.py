"""Saves checkpoints, each whole or invisible, in the foreground or behind training.

A save has two halves. The first, on all ranks, plans who writes what and, for a background save, copies the tensors.
Then each rank writes its file into the aside directory, and the second half gathers the outcomes: rank 0 adds the small
files and the checksums, syncs everything, gives the directory its name, moves the tracker, and only then deletes what `keep`
leaves out.

Invariants:
- A process that dies at any moment leaves every checkpoint saved before whole and the tracker naming one of them.
- The checkpoint just saved is never the one that `keep` deletes.
- A write that fails on one rank is one UserError on all; what was written is removed, former checkpoints are untouched.
- Background writes happen in a thread that calls no collective; the ranks agree in `finish_pending`.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.backend.checkpoint.file_checksums import CHECKSUMS, checksums_content
from relax.backend.checkpoint.files import (
    RELEASE,
    TRACKER,
    aside,
    discard,
    iteration_name,
    iterations,
    publish,
    remove_leftovers,
    replace_file,
    write_file,
)
from relax.backend.checkpoint.write import (
    COMMON,
    CONFIG,
    CONFIG_CONTENT,
    Content,
    ShardWriter,
    Written,
    json_bytes,
    pack_common,
    split_state,
)
from relax.backend.device import is_main_rank
from relax.backend.parallel import agree, gather
from relax.errors import UserError


@dataclass(frozen=True, slots=True)
class _Save:
    """A save between its halves. small: rank 0's files by name; written: gives this rank's results, or raises."""

    step: int
    writer: ShardWriter
    small: dict[str, bytes]
    written: Callable[[], Written]
    future: Future[Written] | None


class CheckpointStore:
    """The checkpoints that one run saves into `directory`. All methods are collective.

    keep: how many checkpoints stay (None: all); flag: what an error message calls the directory.
    """

    def __init__(self, directory: Path, *, keep: int | None = None, flag: str = "--save") -> None:
        self.directory, self.keep, self.flag = Path(directory), keep, flag
        self._lock: int | None = None
        self._pending: _Save | None = None
        self._thread: ThreadPoolExecutor | None = None

    def claim(self) -> None:
        """Make the directory and keep other runs from saving into it while this process lives. UserError where one does."""

        def lock() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.directory, os.O_RDONLY)  # held, and so locked, to the end of the process
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.flag} {self.directory} is in use by another run; wait for it, or choose another directory"
                ) from None
            except OSError as error:
                raise UserError(f"{self.flag} {self.directory} cannot be written: {error}") from error

        agree(lock if is_main_rank() else None)

    def tidy(self) -> None:
        """Remove what a save or a deletion that was cut short left behind, for a run after which no save follows."""

        def remove() -> None:
            try:
                remove_leftovers(self.directory)
            except OSError as error:
                problem = f"{error.filename} cannot be removed: {error.strerror}"
                raise UserError(f"{self.flag} {self.directory}: {problem}") from error

        agree(remove if is_main_rank() else None)

    def save_checkpoint(
        self,
        *,
        step: int,
        state: dict[str, Any],
        files: dict[str, dict[str, Any]],
        async_save: bool = False,
        content: Content | None = None,
    ) -> None:
        """Save `state` (megatron's sharded tensors, and plain values) with JSON `files` (name -> content) as `step`.

        A step that exists is replaced. With `async_save` it returns once the tensors are copied; the checkpoint becomes
        visible in a later `finish_pending`. UserError where the directory cannot be written. `state` is used up.
        `content`: see `ShardWriter`.
        """
        self.finish_pending(blocking=True)
        final = self.directory / iteration_name(step)
        self._together(step, (lambda: self._make_room(final)) if is_main_rank() else None)
        tensors, plain = split_state(state)
        writer = ShardWriter(tensors, aside(final), snapshot=async_save, content=content)
        contents = {name: json_bytes(content) for name, content in files.items()}
        small = {COMMON: pack_common(plain), **contents, CONFIG: json_bytes(CONFIG_CONTENT)}
        future = self._background().submit(writer.write) if async_save else None
        written = future.result if future else writer.write
        self._pending = _Save(step, writer, small, written, future)
        if not async_save:
            self.finish_pending(blocking=True)

    def finish_pending(self, *, blocking: bool) -> bool:
        """Make a save that was written in the background visible; whether none is pending any more.

        Without `blocking` it returns at once while any rank still writes. UserError where the write failed.
        """
        save = self._pending
        if save is None:
            return True
        if not (blocking or self._written_everywhere(save)):
            return False
        self._pending = None
        final = self.directory / iteration_name(save.step)
        written: Written = []
        try:
            self._together(save.step, lambda: written.extend(save.written()))
            gathered = gather(written)
            self._together(save.step, (lambda: self._complete(save, final, gathered)) if is_main_rank() else None)
        except UserError:
            if is_main_rank():
                shutil.rmtree(aside(final), ignore_errors=True)
            raise
        self._together(save.step, (lambda: self._prune(final)) if is_main_rank() else None)
        return True

    @property
    def pending(self) -> int | None:
        """The step whose background save is not finished."""
        return self._pending.step if self._pending else None

    def _make_room(self, final: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)
        aside(final).mkdir()

    def _complete(self, save: _Save, final: Path, written: list[Written]) -> None:
        directory = aside(final)
        for name, content in save.small.items():
            write_file(directory / name, content)
        save.writer.finish(written)
        tensors = [(extent, digest) for one in written for _, extent, digest in one]
        write_file(directory / CHECKSUMS, json_bytes(checksums_content(directory, tensors)))
        if not save.step:  # without a tracker nobody finds a release: a kill between the two must not leave it like that
            replace_file(self.directory / TRACKER, RELEASE.encode())
        publish(directory, final)
        if save.step:
            replace_file(self.directory / TRACKER, str(save.step).encode())

    def _prune(self, newest: Path) -> None:
        """Delete all but the `keep` latest checkpoints, the newest one being the one just saved whatever its step."""
        others = [path for path in iterations(self.directory).values() if path != newest]
        for path in others[: max(0, len(others) + 1 - self.keep)] if self.keep else []:
            try:
                discard(path)
            except OSError as error:
                raise UserError(
                    f"{self.flag} {self.directory}: {newest.name} is saved, but {path.name} cannot be deleted "
                    f"({error.strerror}) as --keep-checkpoints {self.keep} asks"
                ) from None

    def _together(self, step: int, work: Callable[[], None] | None) -> None:
        """Run `work` where there is any; what the file system refuses one rank is the same UserError on all."""

        def explained() -> None:
            assert work is not None
            try:
                work()
            except UserError:
                raise
            except Exception as error:
                cause = _refusal(error)
                if cause is None:
                    raise
                raise UserError(self._explain(step, cause)) from error

        agree(explained if work else None)

    def _explain(self, step: int, cause: OSError) -> str:
        name = iteration_name(step)
        former = [path.name for path in iterations(self.directory).values()] if self.directory.is_dir() else []
        whole = f"the former checkpoint, {former[-1]}, is whole" if former else "no checkpoint is there yet"
        where = f" at {cause.filename}" if cause.filename else ""
        return (
            f"{self.flag} {self.directory}: {name} cannot be saved: {cause.strerror}{where}; {whole}. Make room or "
            "make the directory writable, then run the same command again"
        )

    def _written_everywhere(self, save: _Save) -> bool:
        return all(gather(save.future is None or save.future.done()))

    def _background(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread


def save_checkpoint(
    directory: Path, *, step: int, state: dict[str, Any], files: dict[str, dict[str, Any]], keep: int | None = None
) -> None:
    """Save one checkpoint in the foreground: `CheckpointStore.save_checkpoint` for a caller that saves once."""
    CheckpointStore(directory, keep=keep).save_checkpoint(step=step, state=state, files=files)


def _refusal(error: BaseException | None) -> OSError | None:
    """The file system's error behind `error`: torch's writer raises its own while handling it."""
    while error is not None and not (isinstance(error, OSError) and error.strerror):
        error = error.__cause__ or error.__context__
    return error
