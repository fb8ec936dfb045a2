"""What a person sees of a run: a progress bar on a terminal, else a plain line every few steps; evaluations always.

Invariants: the headline (loss, accuracy, margin: those that the loss has), pairs/s and the time left are in both forms;
the first step, the last one and every evaluation have a line, whatever the interval; text printed in between never
breaks the bar.
"""

import sys
import time
from collections.abc import Iterable, Mapping

from tqdm import tqdm

from relax.objectives import Metric

_FORMATS = {"loss": ".4f", "accuracy": ".3f", "margin": "+.4f"}  # of the headline's metrics, by their role
BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]"


class Console:
    """Shows steps of `total_steps`, of which `start_step` are done. bar None: a bar if standard error is a terminal."""

    def __init__(
        self,
        *,
        title: str,
        total_steps: int,
        start_step: int,
        log_interval: int,
        headline: Mapping[str, Metric],
        bar: bool | None,
    ) -> None:
        self._total, self._interval, self._headline = total_steps, log_interval, headline
        self._first: tuple[int, float] | None = None  # the first step shown, and when
        self._bar: tqdm[None] | None = None
        wanted = sys.stderr.isatty() if bar is None else bar
        if wanted and total_steps > start_step:
            self._bar = tqdm(total=total_steps, initial=start_step, desc=title, bar_format=BAR, dynamic_ncols=True)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one step's metrics: of a training step (with lr, grad norm and pairs/s), of evaluations, or of both."""
        now = time.monotonic()
        trained = "train/lr" in metrics
        if trained and self._bar is not None:
            self._bar.set_postfix_str(", ".join((*self._headlines(metrics), _pace(metrics))), refresh=False)
            self._bar.update(step - self._bar.n)
        elif trained and (step % self._interval == 0 or step == self._total or self._first is None):
            optimizer = f"lr {metrics['train/lr']:.2e}, grad norm {metrics['train/grad_norm']:.3g}"
            parts = (*self._headlines(metrics), optimizer, _pace(metrics), *self._time_left(step, now))
            self.print(f"step {step}/{self._total}: {', '.join(parts)}")
        if trained and self._first is None:
            self._first = (step, now)
        for line in self._evaluations(step, metrics):
            self.print(line)

    def print(self, text: str) -> None:
        """Print text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _headlines(self, metrics: Mapping[str, float]) -> list[str]:
        return [_show(metric, metrics[key]) for key, metric in self._headline.items() if key in metrics]

    def _time_left(self, step: int, now: float) -> list[str]:
        """At the mean pace since the first step, evaluations and checkpoints included."""
        if self._first is None:
            return []
        steps = step - self._first[0]
        return [f"{tqdm.format_interval((now - self._first[1]) / steps * (self._total - step))} left"]

    def _evaluations(self, step: int, metrics: Mapping[str, float]) -> Iterable[str]:
        """One line per evaluation set: of `eval/[NAME/]LOSS_METRIC`, the metrics that the headline names."""
        wanted = [(key.split("/")[1], metric) for key, metric in self._headline.items()]
        for prefix in dict.fromkeys(key.rpartition("/")[0] for key in metrics if key.startswith("eval/")):
            keys = {f"{prefix}/{loss}_{metric.name}": metric for loss, metric in wanted}
            shown = [_show(metric, metrics[key]) for key, metric in keys.items() if key in metrics]
            if shown:
                yield f"{prefix.replace('/', ' ')} at step {step}: {', '.join(shown)}"


def _pace(metrics: Mapping[str, float]) -> str:
    return f"{metrics['perf/pairs_per_s']:.3g} pairs/s"


def _show(metric: Metric, value: float) -> str:
    return f"{metric.role} {value:{_FORMATS[metric.role]}}"
