"""Other things that the command does: evaluate only, plan only, profile, and log elsewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import Workplace, contents

pytestmark = pytest.mark.integration

KEYS = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz01234567"}


@pytest.fixture(scope="module")
def trained(place: Workplace, assets: Path) -> Workplace:
    """out/run after two steps, with TensorBoard and W&B, and a trace of the second step."""
    place.flags.update(num_rollout=2, eval_prompt_data=assets / "eval.jsonl")
    elsewhere = {"tensorboard_dir": "board", "use_wandb": True, "wandb_mode": "offline", "wandb_project": "tests"}
    profile = {"profile": True, "profile_step_start": 2, "profile_step_end": 3}
    place.succeed(save="out/run", save_hf="out/hf", draws=True, environment=KEYS, **elsewhere, **profile)
    return place


def test_no_key_is_written_anywhere(trained: Workplace) -> None:
    """Log, curves, trace, checkpoint with its run's record, export, cache, TensorBoard, W&B."""
    files = contents(trained.directory)
    for name in ("out/run/iter_0000002/relax_run.json", "log/run.jsonl", "out/hf/README.md"):
        assert name in files
    assert any(name.startswith("log/wandb/offline-run-") for name in files) and any(name.startswith("board/") for name in files)
    for key, value in KEYS.items():
        assert [name for name, content in files.items() if value.encode() in content or key.encode() in content] == []


def test_every_metric_goes_to_tensorboard(trained: Workplace) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained.path("board"))).Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in trained.log("run"):
        for key, value in line.items():
            expected.setdefault(key, []).append((line["train/step"], value))
    assert set(events.Tags()["scalars"]) == set(expected)
    for key, points in expected.items():
        found = events.Scalars(key)
        assert [event.step for event in found] == [step for step, _ in points], key
        assert [event.value for event in found] == pytest.approx([value for _, value in points], rel=1e-6), key


def test_wandb_works_offline(trained: Workplace) -> None:
    runs = list(trained.path("log/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1 and runs[0].stat().st_size > 0
    assert trained.path("log/run/wandb_id").read_text() in runs[0].name


def test_a_trace_holds_the_steps_asked_for(trained: Workplace) -> None:
    events = json.loads(trained.path("log/run/trace-rank0.json").read_text())["traceEvents"]
    steps = [event for event in events if str(event.get("name", "")).startswith("Optimizer.step#")]
    assert len(steps) == 1
    assert trained.path("log/run/curves.png").stat().st_size > 10_000


def test_skip_train_evaluates_and_leaves_the_run_alone(trained: Workplace, assets: Path) -> None:
    place, before = trained, contents(trained.directory)
    flags: dict[str, Any] = {"skip_train": True, "num_rollout": None, "prompt_data": None}
    out = place.succeed(save="out/run", load="out/run", **flags)
    assert "run-eval: dpo" in out and "evaluation (3 pairs)" in out and "nothing left" not in out
    after = contents(place.directory)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after.keys() - before.keys() if name.startswith("out/")]
    (line,) = place.log("run-eval")
    last = {key: value for key, value in place.log("run")[-1].items() if key.startswith("eval/")}
    assert line == pytest.approx({"train/step": 2, **last}, rel=1e-9)
    start = place.succeed(exp_name="base", **flags)  # without --load: the model itself
    assert "eval at step 0: loss 0.6931" in start and place.log("base")[0]["eval/dpo_reward_margin"] == 0


def test_dry_run_plans_without_weights_or_processes(fresh_place: Workplace, assets: Path) -> None:
    place = fresh_place
    model = place.path("model")
    model.mkdir()
    for file in (assets / "model").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    flags: dict[str, Any] = {"dry_run": True, "hf_checkpoint": model, "save": "out/run", "num_rollout": None, "num_epoch": 2}
    one = place.succeed(eval_prompt_data=assets / "eval.jsonl", **flags)
    assert "train: 20 of 20 rows kept" in one and "eval: 3 of 3 rows kept" in one
    assert "6 steps of 8 pairs, 3 an epoch, 1 data-parallel ranks" in one
    many = place.succeed(world_size=4, tensor_model_parallel_size=2, use_distributed_optimizer=True, **flags)
    assert "6 steps of 8 pairs, 3 an epoch, 2 data-parallel ranks" in many
    # 2 layers of (4 + 2 x 2 + 4) x 16 x 48 attention and 3 x 80 x 48 MLP, and two embeddings of 272 x 48; halved by TP 2.
    parameters = 2 * (12 * 16 * 48 + 3 * 80 * 48) + 2 * 272 * 48
    assert memory(one)["(M parameters)"] == round(parameters / 1e6, 1)
    assert memory(many)["(M parameters)"] == round(parameters / 2e6, 1)
    assert set(memory(one)) >= {"parameters", "gradients, fp32", "activations", "sum"}
    assert {path.name for path in place.directory.iterdir()} == {"model", ".cache"}


def memory(out: str) -> dict[str, float]:
    """The rows of the memory table."""
    table = out[out.index("memory of a rank, GiB") :].splitlines()[1:]
    return {row[:56].strip(): float(row[56:]) for row in table if re.fullmatch(r".{56} *[\d.]+", row)}


def test_the_report_of_a_log(trained: Workplace) -> None:
    ended = trained.server.start(
        ["log/run.jsonl", "--output", "elsewhere"], directory=trained.directory, module="relax.report"
    ).wait()
    assert ended.code == 0 and ended.out.startswith("run: dpo, 2 steps, 16 pairs") and not ended.err
    assert "curves: elsewhere/curves.png" in ended.out and trained.path("elsewhere/curves.png").exists()
