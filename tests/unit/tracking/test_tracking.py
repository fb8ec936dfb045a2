"""Tracker and console: the log of new, interrupted and resumed runs, console, W&B, TensorBoard."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax.errors import UserError
from relax.objectives import Metric
from relax.tracking import console
from relax.tracking import tracker as tracking
from relax.tracking.tracker import Tracker, WandbOptions, cut_back

HEADLINE = {
    "train/dpo/loss": Metric("loss", "loss"),
    "train/dpo/tie_aware_accuracy": Metric("tie_aware_accuracy", "accuracy"),
    "train/dpo/reward_margin": Metric("reward_margin", "margin"),
}


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def tracker(log_dir: Path, **changes) -> Tracker:
    options = {
        "exp_name": "first",
        "total_steps": 4,
        "start_step": 0,
        "log_interval": 1,
        "headline": HEADLINE,
        "wandb": None,
        "tensorboard_dir": None,
        "config": {"lr": 5e-7},
        "bar": False,
    }
    return Tracker(log_dir=log_dir, **{**options, **changes})


def train(step: int) -> dict[str, float]:
    return {
        "train/step": step,
        "train/dpo/loss": math.log(2) / step,
        "train/dpo/tie_aware_accuracy": 0.5,
        "train/dpo/reward_margin": -0.25,
        "train/lr": 5e-7,
        "train/grad_norm": 3.14159,
        "perf/pairs_per_s": 12.345,
    }


EVAL = {"eval/dpo_loss": 0.5, "eval/dpo_tie_aware_accuracy": 0.75, "eval/dpo_num_pairs": 3}
NAMED = {"eval/held/dpo_loss": 0.25, "eval/held/dpo_reward_margin": 1.0}


def lines(log_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (log_dir / "first.jsonl").read_text().splitlines()]


def test_one_line_per_step_readable_at_once_and_bit_for_bit(tmp_path):
    run = tracker(tmp_path)
    run.log(0, EVAL)
    run.log(1, {**train(1), **NAMED, "train/dpo/loss": 0.1 + 0.2})
    assert lines(tmp_path) == [
        {"train/step": 0, **EVAL},
        {**train(1), **NAMED, "train/dpo/loss": 0.30000000000000004},
    ], "the log is complete before it is closed"
    assert list(lines(tmp_path)[0])[0] == "train/step"
    run.close()
    run.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_raises_and_writes_nothing(tmp_path, value):
    run = tracker(tmp_path)
    with pytest.raises(ValueError, match=rf"^step 1: train/dpo/loss is {value}$"):
        run.log(1, {**train(1), "train/dpo/loss": value})
    assert lines(tmp_path) == []


def test_no_step_is_logged_twice(tmp_path):
    run = tracker(tmp_path)
    run.log(1, train(1))
    with pytest.raises(ValueError, match="^step 1 cannot be logged after step 1$"):
        run.log(1, train(1))
    resumed = tracker(tmp_path, start_step=1)
    with pytest.raises(ValueError, match="^step 1 cannot be logged after step 1$"):
        resumed.log(1, train(1))


@pytest.mark.parametrize("torn", ["", '{"train/step": 4, "train/dp', '{"train/step": 4}', "{"])
def test_resume_cuts_the_log_back_to_the_checkpoint(tmp_path, torn):
    whole = tracker(tmp_path)
    for step in range(1, 5):
        whole.log(step, train(step))
    whole.close()
    log = tmp_path / "first.jsonl"
    expected = log.read_text()
    log.write_text("".join(expected.splitlines(keepends=True)[:3]) + torn)  # killed in step 4, checkpoint at step 2
    resumed = tracker(tmp_path, start_step=2)
    for step in (3, 4):
        resumed.log(step, train(step))
    assert log.read_text() == expected, "the same bytes as a run that was never interrupted"


def test_a_line_killed_before_its_newline_is_kept_where_the_checkpoint_has_its_step(tmp_path):
    log = tmp_path / "first.jsonl"
    log.write_text('{"train/step": 1}\n{"train/step": 2}')
    assert cut_back(log, step=2) == 2
    assert log.read_text() == '{"train/step": 1}\n{"train/step": 2}\n'


def test_a_log_that_lacks_steps_before_the_checkpoint_says_so(tmp_path, capsys):
    log = tmp_path / "first.jsonl"
    log.write_text('{"train/step": 1}\n')
    tracker(tmp_path, start_step=3).log(4, train(4))
    assert [line["train/step"] for line in lines(tmp_path)] == [1, 4]
    assert f"{log} ends at step 1, before the checkpoint's step 3: steps are missing\n" in capsys.readouterr().out
    log.unlink()
    tracker(tmp_path, start_step=3).log(4, train(4))
    assert f"{log} ends at step 0, before the checkpoint's step 3: steps are missing\n" in capsys.readouterr().out


def test_a_broken_line_in_the_middle_is_an_error_and_changes_nothing(tmp_path):
    log = tmp_path / "first.jsonl"
    log.write_text('{"train/step": 1}\nnoise\n{"train/step": 2}\n')
    with pytest.raises(UserError) as caught:
        tracker(tmp_path, start_step=2)
    advice = "move the file away or choose another --exp-name"
    assert str(caught.value) == f"{log}, line 2 is not an object with train/step: {advice}"
    assert log.read_text() == '{"train/step": 1}\nnoise\n{"train/step": 2}\n'


def test_a_new_run_keeps_the_old_log_beside_its_own(tmp_path, capsys):
    (tmp_path / "first.jsonl").write_text('{"train/step": 9}\n')
    tracker(tmp_path).log(0, EVAL)
    assert (tmp_path / "first.jsonl.old").read_text() == '{"train/step": 9}\n'
    assert [line["train/step"] for line in lines(tmp_path)] == [0]
    assert f"kept the log of an earlier run as {tmp_path}/first.jsonl.old\n" in capsys.readouterr().out


def test_a_log_that_cannot_be_written_is_a_plain_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the log .*first\.jsonl: .*; see --log-dir$"):
        tracker(tmp_path / "file")
    run = tracker(tmp_path)
    run._log.close()
    full = Path("/dev/full")
    if full.exists():
        run._log = full.open("a")
        with pytest.raises(UserError, match=r"^cannot write the metrics of step 1 to .*No space left on device$"):
            run.log(1, train(1))


def test_plain_lines_every_interval_and_every_evaluation(tmp_path, capsys, monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 30.0, 40.0, 50.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    run = tracker(tmp_path, total_steps=5, log_interval=2)
    run.log(0, {**EVAL, **NAMED})
    for step in range(1, 6):
        run.log(step, train(step))
    tail = "accuracy 0.500, margin -0.2500, lr 5.00e-07, grad norm 3.14, 12.3 pairs/s"
    assert capsys.readouterr().out.splitlines() == [
        "eval at step 0: loss 0.5000, accuracy 0.750",
        "eval held at step 0: loss 0.2500, margin +1.0000",
        f"step 1/5: loss 0.6931, {tail}",
        f"step 2/5: loss 0.3466, {tail}, 00:30 left",
        f"step 4/5: loss 0.1733, {tail}, 00:10 left",
        f"step 5/5: loss 0.1386, {tail}, 00:00 left",
    ]


LOSS, _, MARGIN = HEADLINE


@pytest.mark.parametrize("kept", [(), (LOSS,), (MARGIN,)], ids=["none", "loss", "margin"])
def test_a_loss_without_the_usual_metrics_shows_those_it_has(tmp_path, capsys, kept):
    shown = {LOSS: "loss 0.6931, ", MARGIN: "margin -0.2500, "}
    metrics = {key: value for key, value in train(1).items() if key not in HEADLINE or key in kept}
    run = tracker(tmp_path)
    run.log(1, {**metrics, "eval/dpo_mine": 1.0, "eval/dpo_num_pairs": 3})
    text = "".join(shown[key] for key in kept)
    assert capsys.readouterr().out == f"step 1/4: {text}lr 5.00e-07, grad norm 3.14, 12.3 pairs/s\n"
    run = tracker(tmp_path, bar=True)
    run.log(1, metrics)
    run.close()
    assert f" left, {text}12.3 pairs/s]" in capsys.readouterr().err


def test_the_bar_shows_the_headline_and_survives_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "BAR", console.BAR.replace("|{bar}|", ""))
    run = tracker(tmp_path, total_steps=10, start_step=4, bar=True)
    run.log(5, {**train(5), **EVAL})
    run.print("checkpoint saved")
    run.close()
    run.print("after the bar")
    written = capsys.readouterr()
    last = written.err.split("\r")[-1]
    assert last.startswith("first  50% 5/10 [")
    assert " left, loss 0.1386, accuracy 0.500, margin -0.2500, 12.3 pairs/s]" in last
    for text in ("eval at step 5: loss 0.5000, accuracy 0.750\n", "checkpoint saved\n", "after the bar\n"):
        assert text in written.out


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_decides_on_the_bar(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    run = tracker(tmp_path, bar=None)
    assert (run._console._bar is not None) == terminal
    run.close()
    done = tracker(tmp_path, bar=None, start_step=4)
    assert done._console._bar is None, "a run with nothing to do has no bar"


def test_tensorboard_events_read_back_without_the_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    killed = tracker(tmp_path, tensorboard_dir=board)
    killed.log(0, EVAL)
    for step in (1, 2, 3):
        killed.log(step, {**train(step), "train/grad_norm": 1.0})
    killed.close()
    resumed = tracker(tmp_path, tensorboard_dir=board, start_step=1)
    for step in (2, 3):
        resumed.log(step, {**train(step), "train/grad_norm": 2.0})
    resumed.close()
    events = EventAccumulator(str(board))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/dpo_loss")] == [(0, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("train/grad_norm")] == [(1, 1.0), (2, 2.0), (3, 2.0)]
    assert "flags/text_summary" in events.Tags()["tensors"]


OFFLINE = """
from pathlib import Path
from relax.objectives import Metric
from relax.tracking.tracker import Tracker, WandbOptions
run = Tracker(log_dir=Path("log"), exp_name="first", total_steps=1, start_step=0, log_interval=1, headline={},
              wandb=WandbOptions(project="pairs", name="nice", mode=MODE), tensorboard_dir=None, config={}, bar=False)
run.log(0, {"eval/dpo_loss": 0.5})
run.log(1, {"train/dpo/loss": 0.5, "eval/held/dpo_loss": 0.25})
run.close()
"""


@pytest.mark.parametrize(("flag", "environment"), [("offline", {}), (None, {"WANDB_MODE": "offline"})])
def test_wandb_offline_leaves_a_run_below_the_log_directory(tmp_path, flag, environment):
    # A process of its own: W&B reads its environment once, and the file is whole only when the process has ended.
    environment = {**os.environ, "PYTHONPATH": str(Path(tracking.__file__).parents[1]), **environment}
    code = OFFLINE.replace("MODE", repr(flag))
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True)
    (recorded,) = (tmp_path / "log" / "wandb").glob("offline-run-*/run-*.wandb")
    content = recorded.read_bytes()
    for text in (b"pairs", b"nice", b"eval/dpo_loss", b"train/dpo/loss", b"eval/held/dpo_loss"):
        assert text in content
    assert recorded.name == f"run-{(tmp_path / 'log' / 'first' / 'wandb_id').read_text()}.wandb"


def test_a_resumed_run_continues_its_wandb_run_and_a_new_one_does_not(tmp_path):
    ids = []
    for start_step in (0, 1, 0):
        tracker(tmp_path, wandb=WandbOptions("pairs", "nice", "offline"), start_step=start_step).close()
        ids.append((tmp_path / "first" / "wandb_id").read_text())
    assert ids[0] == ids[1] != ids[2]


class HalfDoneRun:
    """What W&B gives for an online run that it holds up to step 2."""

    id, step = "abc", 3

    def __init__(self):
        self.logged = []

    def log(self, entry, step):
        self.logged.append(step)

    def finish(self):
        self.logged.append("finished")


def test_wandb_does_not_get_steps_again_that_it_holds(tmp_path, monkeypatch):
    import wandb

    online = HalfDoneRun()
    monkeypatch.setattr(wandb, "init", lambda **_: online)
    run = tracker(tmp_path, wandb=WandbOptions(project="p", name="n"))
    for step in range(1, 5):
        run.log(step, train(step))
    run.close()
    assert online.logged == [3, 4, "finished"]


def test_wandb_that_does_not_start_is_one_message(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("No API key\n configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError) as caught:
        tracker(tmp_path, wandb=WandbOptions(project="p", name="n"))
    assert str(caught.value) == (
        "--use-wandb: W&B did not start: No API key configured. (run `wandb login`, or use --wandb-mode offline)"
    )


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="^--use-wandb needs the package wandb: pip install wandb$"):
        tracker(tmp_path, wandb=WandbOptions(project="p", name="n"))
    with pytest.raises(UserError, match="^--tensorboard-dir needs the package tensorboard: pip install tensorboard$"):
        tracker(tmp_path, tensorboard_dir=tmp_path / "board")
