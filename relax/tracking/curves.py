"""The figure of a run: loss, accuracy, margin, and learning rate with gradient norm, over optimizer steps.

Invariants: training is a line (its running mean once there are enough steps, the raw values faint behind it), every
evaluation set a line with a marker at each evaluation, in one colour in all panels.
"""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from relax.report import RunLog, Series

TRAIN, NORM, GRID = "#3b6fb6", "#8a8f98", "#e4e6ea"
EVALS = ("#d9541e", "#2a9d6f", "#8f5bb5", "#c2377e", "#a07d13", "#188a9e")
MARKERS = "osD^vP"
PANELS = (  # title, axis label, how to find the metric, the value of a model that knows nothing
    ("Loss", "mean loss per pair", lambda name: name == "loss", None),
    ("Accuracy", "pairs ranked right, ties half", lambda name: name == "tie_aware_accuracy", 0.5),
    ("Margin", "chosen minus rejected", lambda name: name.endswith("_margin"), 0.0),
)


def draw(run: RunLog, *, title: str) -> Figure:
    """The figure, 2 x 2 panels; nothing is written."""
    figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 2)
    for axis, (name, label, wanted, neutral) in zip(axes.flat, PANELS, strict=False):
        _style(axis, name, label)
        if neutral is not None:
            axis.axhline(neutral, color="#9aa0a8", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        _draw_metric(axis, run, wanted)
    _draw_optimizer(axes[1, 1], run)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.suptitle(f"{title}  ({run.loss_type})", fontsize=13, fontweight="bold")
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    return figure


def running_mean(series: Series) -> tuple[Series, int]:
    """For each step the mean of the last 5% of the run's steps, and how many those are (1 for a short run)."""
    window = max(1, len(series) // 20)
    steps, values = list(series), list(series.values())
    means = {step: sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i, step in enumerate(steps)}
    return means, window


def _draw_metric(axis: Axes, run: RunLog, wanted: Callable[[str], bool]) -> None:
    for name, series in run.train.items():
        if wanted(name):
            smooth, window = running_mean(series)
            label = "train" if window == 1 else f"train (mean of {window} steps)"
            if window > 1:
                axis.plot(list(series), list(series.values()), color=TRAIN, alpha=0.22, linewidth=0.9, zorder=2)
            axis.plot(list(smooth), list(smooth.values()), color=TRAIN, linewidth=1.9, label=label, zorder=3)
    for number, (title, metrics) in enumerate(run.evals.items()):
        for name, series in metrics.items():
            if wanted(name):
                axis.plot(
                    list(series),
                    list(series.values()),
                    color=EVALS[number % len(EVALS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=6,
                    markeredgecolor="white",
                    linewidth=1.4,
                    label=f"eval {title}".rstrip(),
                    zorder=4,
                )


def _draw_optimizer(axis: Axes, run: RunLog) -> None:
    _style(axis, "Learning rate and gradient norm", "learning rate")
    norms = axis.twinx()
    norms.set_ylabel("gradient norm", color=NORM)
    norms.tick_params(length=0, labelcolor=NORM)
    norms.spines[:].set_visible(False)
    for name, on, color, width in (("grad_norm", norms, NORM, 1.0), ("lr", axis, TRAIN, 1.9)):
        series = run.train.get(name, {})
        on.plot(list(series), list(series.values()), color=color, linewidth=width)
        on.set_ylim(bottom=0)
    axis.yaxis.label.set_color(TRAIN)
    axis.tick_params(axis="y", labelcolor=TRAIN)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axis.grid(visible=False)  # it would lie above the norms
    axis.set_zorder(norms.get_zorder() + 1)
    axis.patch.set_visible(False)


def _style(axis: Axes, title: str, label: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel(label)
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b7bcc4")
