"""What a run writes while it trains: the metrics log, the console, and W&B and TensorBoard where asked. Rank 0 only.

The log, `EXP.jsonl`, is the record: one object per step, evaluation included, written and flushed before `log` returns,
so that a step whose checkpoint is saved after its `log` is never missing. Invariants:
- A new run starts a new log; a log that was there is kept beside it as `EXP.jsonl.old`.
- A resumed run first cuts the log back to the checkpoint's step, a torn last line included, so no step is there twice.
- Every float reads back bit for bit, and a value that is not finite raises before anything is written.
- W&B and TensorBoard are imported only when they are used.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from relax.errors import UserError
from relax.objectives import Metric
from relax.tracking.console import Console


@dataclass(frozen=True, slots=True)
class WandbOptions:
    """A W&B run. mode None: what WANDB_MODE says, else online."""

    project: str
    name: str
    mode: Literal["online", "offline", "disabled"] | None = None


class Tracker:
    """Takes the metrics of each step and brings them everywhere."""

    def __init__(
        self,
        *,
        log_dir: Path,
        exp_name: str,
        total_steps: int,
        start_step: int,
        log_interval: int,
        headline: Mapping[str, Metric],
        wandb: WandbOptions | None,
        tensorboard_dir: Path | None,
        config: dict[str, Any],
        bar: bool | None,
    ) -> None:
        """Open the log of a run that stands at `start_step` (0: a new run) of `total_steps`.

        headline: the metrics for the console by their keys, `train/...`. bar: a progress bar, or plain lines every
        `log_interval` steps; None asks the terminal. Raises UserError where a log cannot be written or continued, or a
        service does not start.
        """
        self.path = log_dir / f"{exp_name}.jsonl"
        self._last = start_step if start_step else -1
        self._console = Console(
            title=exp_name,
            total_steps=total_steps,
            start_step=start_step,
            log_interval=log_interval,
            headline=headline,
            bar=bar,
        )
        self._log = self._open_log(start_step)
        self._wandb = _start_wandb(wandb, log_dir, exp_name, start_step, config) if wandb else None
        self._tensorboard = _start_tensorboard(tensorboard_dir, start_step, config) if tensorboard_dir else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record all metrics of one step. Raises ValueError for a step that was logged before or a value not finite."""
        if step <= self._last:
            raise ValueError(f"step {step} cannot be logged after step {self._last}")
        for key, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"step {step}: {key} is {value}")
        entry = {"train/step": step} | metrics
        try:
            self._log.write(json.dumps(entry, allow_nan=False) + "\n")
            self._log.flush()
        except OSError as error:
            with suppress(OSError):
                self._log.close()  # gives up what it still holds, which would fail again when the run closes it
            raise UserError(f"cannot write the metrics of step {step} to {self.path}: {error}") from None
        self._last = step
        if self._wandb and step >= self._wandb.step:  # W&B already holds the steps that a resumed run repeats
            self._wandb.log(entry, step=step)
        if self._tensorboard:
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        self._console.show(step, metrics)

    def print(self, text: str) -> None:
        """Print text without breaking the progress bar."""
        self._console.print(text)

    def close(self) -> None:
        """Finish the bar, the files and the services."""
        self._console.close()
        self._log.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()
            self._wandb = None

    def _open_log(self, start_step: int) -> IO[str]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if start_step == 0 and self.path.exists():
                self.path.replace(old := self.path.with_suffix(".jsonl.old"))
                self.print(f"kept the log of an earlier run as {old}")
            last = cut_back(self.path, step=start_step) if start_step else 0
            if last < start_step:
                self.print(f"{self.path} ends at step {last}, before the checkpoint's step {start_step}: steps are missing")
            return self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {error}; see --log-dir") from None


def cut_back(path: Path, *, step: int) -> int:
    """Drop a log's lines after `step`, and a torn last line; the step of the last line that stays, 0 without any.

    Raises UserError for a broken line before the last one.
    """
    last, kept, ended = 0, 0, True
    if not path.exists():
        return last
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        entry_step = _step_of(line)
        if entry_step is None and number < len(lines):
            advice = "move the file away or choose another --exp-name"
            raise UserError(f"{path}, line {number} is not an object with train/step: {advice}")
        if entry_step is None or entry_step > step:
            break
        last, kept, ended = entry_step, kept + len(line), line.endswith(b"\n")
    os.truncate(path, kept)
    if not ended:
        with path.open("ab") as file:
            file.write(b"\n")
    return last


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["train/step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _start_wandb(options: WandbOptions, log_dir: Path, exp_name: str, start_step: int, config: dict[str, Any]) -> Any:
    """A W&B run below `log_dir`; a resumed run continues the W&B run whose id is beside its curves."""
    id_file = log_dir / exp_name / "wandb_id"
    known = id_file.read_text().strip() if start_step and id_file.is_file() else None
    try:
        import wandb

        run = wandb.init(
            project=options.project,
            name=options.name,
            mode=options.mode,
            dir=str(log_dir),
            config=config,
            id=known,
            resume="allow" if known else None,
            settings=wandb.Settings(console="off"),
        )
    except ImportError:
        raise UserError("--use-wandb needs the package wandb: pip install wandb") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--use-wandb: W&B did not start: {reason} (run `wandb login`, or use --wandb-mode offline)") from None
    id_file.parent.mkdir(parents=True, exist_ok=True)
    id_file.write_text(run.id)
    return run


def _start_tensorboard(directory: Path, start_step: int, config: dict[str, Any]) -> Any:
    """A TensorBoard writer that hides what an interrupted run wrote after `start_step`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard-dir needs the package tensorboard: pip install tensorboard") from None
    writer = SummaryWriter(log_dir=str(directory), purge_step=start_step + 1 if start_step else 0)
    rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
    writer.add_text("flags", f"| flag | value |\n| --- | --- |\n{rows}", start_step)
    return writer
