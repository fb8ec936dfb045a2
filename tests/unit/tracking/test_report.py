"""`relax.report` and `relax.tracking.curves`: the log as read, the table's exact text, and the figure."""

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from relax.errors import UserError
from relax.report import curves, main, read_log, summary
from relax.tracking.curves import draw, running_mean


def entries() -> list[dict[str, float]]:
    evaluation = {"eval/dpo_loss": 0.7, "eval/dpo_tie_aware_accuracy": 0.5, "eval/dpo_num_pairs": 12}
    named = {"eval/held/dpo_loss": 0.75, "eval/held/dpo_num_pairs": 3}
    steps: list[dict[str, float]] = [{"train/step": 0, **evaluation, **named}]
    for step in (1, 2, 3):
        steps.append(
            {
                "train/step": step,
                "train/epoch": step / 10,
                "train/consumed_pairs": 8 * step,
                "train/dpo/loss": 0.7 - 0.1 * step,
                "train/dpo/tie_aware_accuracy": 0.25 * step,
                "train/dpo/reward_margin": -0.5 * step,
                "train/lr": 1e-6 / step,
                "train/grad_norm": 2.0,
                "perf/step_time_s": float(step),
                "perf/pairs_per_s": 8 / step,
                "perf/tokens_per_s_per_gpu": 6000 / step,
                "perf/peak_memory_gib": 4.0 - step,
                "perf/data_wait_s": 0.5,
            }
        )
    steps[-1] |= {**evaluation, **named, "eval/dpo_loss": 0.5, "eval/dpo_tie_aware_accuracy": 0.75}
    return steps


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "first.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries()))
    return path


def test_the_log_is_read_into_series(log):
    run = read_log(log)
    assert run.loss_type == "dpo"
    assert run.train["reward_margin"] == {1: -0.5, 2: -1.0, 3: -1.5}
    assert run.train["grad_norm"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert run.perf["step_time_s"] == {1: 1.0, 2: 2.0, 3: 3.0}
    assert run.evals == {
        "": {"loss": {0: 0.7, 3: 0.5}, "tie_aware_accuracy": {0: 0.5, 3: 0.75}, "num_pairs": {0: 12, 3: 12}},
        "held": {"loss": {0: 0.75, 3: 0.75}, "num_pairs": {0: 3, 3: 3}},
    }


SUMMARY = """\
first: dpo, 3 steps, 24 pairs

evaluation (12 pairs)                   step 0        step 3        change
  loss                                  0.7000        0.5000       -0.2000
  tie_aware_accuracy                    0.5000        0.7500       +0.2500

evaluation held (3 pairs)               step 0        step 3        change
  loss                                  0.7500        0.7500       +0.0000

training                                step 1        step 3
  loss                                  0.6000        0.4000
  tie_aware_accuracy                    0.2500        0.7500
  reward_margin                        -0.5000       -1.5000
  lr                                 1.000e-06     3.333e-07
  grad_norm                             2.0000        2.0000

performance                               mean
  step_time_s                                2
  pairs_per_s                                4
  tokens_per_s_per_gpu                   3,000
  peak_memory_gib (highest)                  3
  data_wait_s                              0.5"""


def test_the_summary_to_the_letter(log):
    assert summary(log) == SUMMARY


def test_the_summary_of_an_evaluation_alone_and_of_a_run_without_one(log):
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text(first)
    assert summary(log) == (
        "first: dpo\n\n"
        "evaluation (12 pairs)                   step 0\n"
        "  loss                                  0.7000\n"
        "  tie_aware_accuracy                    0.5000\n\n"
        "evaluation held (3 pairs)               step 0\n"
        "  loss                                  0.7500"
    )
    log.write_text(others[0].replace("dpo", "rm"))
    assert summary(log).startswith("first: rm, 1 step, 8 pairs\n\ntraining                                step 1\n")


def test_a_log_being_written_is_read_to_its_last_whole_line(log):
    with log.open("a") as file:
        file.write('{"train/step": 4, "train/dpo/lo')
    assert summary(log) == SUMMARY


def test_logs_that_are_none(tmp_path):
    log = tmp_path / "x.jsonl"
    with pytest.raises(UserError, match=r"^cannot read the log .*x\.jsonl: .*No such file"):
        read_log(log)
    log.write_text('{"train/step": 1}\n[]\n')
    with pytest.raises(UserError) as caught:
        read_log(log)
    assert str(caught.value) == f"{log}, line 2 is not an object with train/step: is it a relax log?"
    for text in ("", '{"train/step": 1}\n'):
        log.write_text(text)
        with pytest.raises(UserError, match="holds no loss: there is nothing to report$"):
            read_log(log)


def test_the_running_mean_covers_a_twentieth_of_the_run():
    series = {step: float(step) for step in range(1, 61)}
    means, window = running_mean(series)
    assert window == 3
    assert (means[1], means[2], means[3], means[60]) == (1.0, 1.5, 2.0, 59.0)
    assert running_mean({1: 5.0, 2: 7.0}) == ({1: 5.0, 2: 7.0}, 1)


def test_the_figure_shows_the_logs_values(log):
    figure = draw(read_log(log), title="first")
    loss, accuracy, margin, rate, norm = figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines}
    assert drawn == {
        "train": ([1, 2, 3], [0.7 - 0.1, 0.7 - 0.2, 0.7 - 0.1 * 3]),
        "eval": ([0, 3], [0.7, 0.5]),
        "eval held": ([0, 3], [0.75, 0.75]),
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["train", "eval", "eval held"]
    assert list(accuracy.lines[1].get_ydata()) == [0.25, 0.5, 0.75]
    assert list(margin.lines[1].get_ydata()) == [-0.5, -1.0, -1.5]
    assert list(rate.lines[0].get_ydata()) == [1e-6, 1e-6 / 2, 1e-6 / 3]
    assert list(norm.lines[0].get_ydata()) == [2.0, 2.0, 2.0]
    labels = ("mean loss per pair", "pairs ranked right, ties half", "chosen minus rejected", "learning rate")
    assert tuple(axis.get_ylabel() for axis in (loss, accuracy, margin, rate)) == labels
    assert {axis.get_xlabel() for axis in (loss, accuracy, margin, rate)} == {"step"}


@pytest.mark.parametrize("last", [1, 2, 3, 24, 1000])
def test_the_step_axis_has_whole_numbers(log, last):
    entry = json.loads(log.read_text().splitlines()[1])
    log.write_text("".join(json.dumps({**entry, "train/step": step}) + "\n" for step in range(1, last + 1)))
    for axis in draw(read_log(log), title="first").axes:
        assert axis.get_xticks().tolist() == [round(tick) for tick in axis.get_xticks()]


def test_curves_is_a_png_with_content(log, tmp_path):
    output = tmp_path / "new" / "curves.png"
    curves(log, output)
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(output)
    assert image.shape[:2] == (1080, 1650)
    assert 0.02 < (image[..., :3].min(axis=2) < 0.9).mean() < 0.5, "neither blank nor black"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^cannot write .*file/curves\.png: "):
        curves(log, tmp_path / "file" / "curves.png")


def test_the_command(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", str(log)])
    main()
    assert capsys.readouterr().out == f"{SUMMARY}\n\ncurves: {tmp_path}/first/curves.png\n"
    assert (tmp_path / "first" / "curves.png").stat().st_size > 10_000
    command = [sys.executable, "-m", "relax.report", str(tmp_path / "gone.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"relax: error: cannot read the log {tmp_path}/gone.jsonl: ")
    assert done.stderr.count("\n") == 1
