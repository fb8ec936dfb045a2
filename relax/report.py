"""`python -m relax.report LOG.jsonl`: what a run did, as a table and as curves, from its log alone.

Invariants: every number shown is one that the log holds, or a mean over steps; a log that is still being written (a
torn last line) is read up to its last whole line.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.cli.command import Parser, path, run_command
from relax.errors import UserError

Series = dict[int, float]  # step -> value, in order of steps


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run's metrics by short name: train ("loss", "lr", ...), perf, and evals by set (the unnamed one is "")."""

    loss_type: str
    train: dict[str, Series] = field(default_factory=dict)
    perf: dict[str, Series] = field(default_factory=dict)
    evals: dict[str, dict[str, Series]] = field(default_factory=dict)


def main() -> None:
    """Print the summary of a log and write its curves."""
    parser = Parser(prog="python -m relax.report", description="A table and curves of a training run, from its log.")
    parser.add_argument("log", type=path, metavar="LOG.jsonl", help="the log of a run, log/NAME.jsonl")
    parser.add_argument("--output", type=path, metavar="DIR", help="where curves.png goes (default: LOG without .jsonl)")
    args = parser.parse()
    output = (args.output or args.log.with_suffix("")) / "curves.png"
    print(summary(args.log))
    curves(args.log, output)
    print(f"\ncurves: {output}")


def read_log(log: Path) -> RunLog:
    """Read a metrics log. Raises UserError, with file and line, for what is none."""
    entries = list(_entries(log))
    keys = dict.fromkeys(key for entry in entries for key in entry)
    run = RunLog(loss_type=_loss_type(keys, log))
    for entry in entries:
        step = int(entry["train/step"])
        for key, value in entry.items():
            _series(run, key)[step] = value
    return run


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the log {log}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            int(entry["train/step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines) and not line.endswith("\n"):
                return
            raise UserError(f"{log}, line {number} is not an object with train/step: is it a relax log?") from None
        yield entry


def _loss_type(keys: dict[str, None], log: Path) -> str:
    for pattern in (r"train/(\w+)/loss", r"eval/(?:[^/]+/)?(\w+)_loss"):
        for key in keys:
            if match := re.fullmatch(pattern, key):
                return match[1]
    raise UserError(f"{log} holds no loss: there is nothing to report")


def _series(run: RunLog, key: str) -> Series:
    """Where a key of the log belongs: `train/[LOSS/]METRIC`, `perf/METRIC`, `eval/[NAME/]LOSS_METRIC`."""
    kind, _, rest = key.partition("/")
    if kind == "eval":
        name, _, metric = rest.rpartition("/")
        metrics = run.evals.setdefault(name, {})
        return metrics.setdefault(metric.removeprefix(f"{run.loss_type}_"), {})
    if kind == "perf":
        return run.perf.setdefault(rest, {})
    return run.train.setdefault(rest.removeprefix(f"{run.loss_type}/"), {})


def summary(log: Path) -> str:
    """Plain text: evaluation before and after, training first and last, throughput and memory. Raises UserError."""
    run = read_log(log)
    title = f"{log.stem}: {run.loss_type}"
    if "loss" in run.train:
        steps = len(run.train["loss"])
        title += f", {steps} step{'' if steps == 1 else 's'}, {list(run.train['consumed_pairs'].values())[-1]:.0f} pairs"
    blocks = [[title]]
    for name, metrics in run.evals.items():
        pairs = list(metrics["num_pairs"].values())[-1]
        shown = {metric: series for metric, series in metrics.items() if metric != "num_pairs"}
        count = f"{pairs:.0f} pair{'' if pairs == 1 else 's'}"
        blocks.append(_table(f"evaluation{f' {name}' if name else ''} ({count})", shown, change=True))
    hidden = {"step", "epoch", "consumed_pairs"}
    trained = {metric: series for metric, series in run.train.items() if metric not in hidden and series}
    if trained:
        blocks.append(_table("training", trained, change=False))  # the two steps' batches are different pairs
    if run.perf:
        blocks.append(_performance(run.perf))
    return "\n\n".join("\n".join(block) for block in blocks)


def _table(title: str, metrics: dict[str, Series], *, change: bool) -> list[str]:
    """Rows of first value, last value and, where asked for, their difference; one column where there is one step."""
    steps = sorted({step for series in metrics.values() for step in series})
    ends = [steps[0], steps[-1]] if len(steps) > 1 else steps
    heads = [f"step {step}" for step in ends] + ["change"] * (change and len(ends) > 1)
    rows = [f"{title:<32}" + "".join(f"{head:>14}" for head in heads)]
    for metric, series in metrics.items():
        values = [series[step] for step in ends if step in series]
        scale = ".3e" if metric == "lr" else ".4f"
        cells = [f"{value:z{scale}}" for value in values]
        if change and len(values) > 1:
            cells.append(f"{values[-1] - values[0]:+z{scale}}")
        rows.append(f"  {metric:<30}" + "".join(f"{cell:>14}" for cell in cells))
    return rows


def _performance(perf: dict[str, Series]) -> list[str]:
    """Rates as means weighted by the steps' time, times as plain means, the highest memory."""
    seconds = perf["step_time_s"]
    rows = [f"{'performance':<32}{'mean':>14}"]
    for metric, series in perf.items():
        if metric == "peak_memory_gib":
            metric, value = "peak_memory_gib (highest)", max(series.values())
        elif metric.endswith("_s") and not metric.endswith("_per_s"):
            value = sum(series.values()) / len(series)
        else:
            value = sum(rate * seconds[step] for step, rate in series.items()) / sum(seconds[step] for step in series)
        rows.append(f"  {metric:<30}{f'{value:,.0f}' if value >= 1000 else f'{value:.4g}':>14}")
    return rows


def curves(log: Path, output: Path) -> None:
    """Draw loss, accuracy, margin, learning rate and gradient norm over steps into a PNG file. Raises UserError."""
    from relax.tracking.curves import draw  # matplotlib loads only here

    figure = draw(read_log(log), title=log.stem)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error}") from None


if __name__ == "__main__":
    run_command(main)
