"""A run that was cut short, in whatever way, ends as one that was not: same log lines, same weights, bit for bit."""

import json
import random
import shutil
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.command import Running, Workplace, contents, timeless, write_pairs
from tests.models import CHATML

pytestmark = pytest.mark.integration

LONG = 96  # steps: enough to be hit by a signal on the way, also where the test has to wait for the processor
KINDS: dict[str, dict[str, Any]] = {
    "dpo-bf16": {"no_bf16": None},
    "dpo-fp32-distributed": {"use_distributed_optimizer": True, "lr_decay_style": "WSD", "lr_warmup_iters": 2},
    "dpo-coupled": {"dpo_loss": "bco,beta_dpo", "dpo_beta": 0.1, "dpo_shift": "running"},
    "rm-fp32": {"loss_type": "rm", "weight_decay": 0.1},
}


def weights(place: Workplace, export: str) -> bytes:
    return place.path(f"{export}/model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_and_the_same_command_again_are_six_steps(fresh_place: Workplace, assets: Path, kind: str) -> None:
    place = fresh_place
    flags = KINDS[kind] | {"eval_prompt_data": assets / "eval.jsonl", "eval_interval": 2}
    flags |= {"save": "out/run", "load": "out/run", "save_interval": 3, "save_hf": "out/hf"}
    place.succeed(**flags)
    log, exported = timeless(place.log("run")), contents(place.path("out/hf"))
    checkpoint = place.path("out/run/iter_0000006/__0_0.distcp").read_bytes()

    shutil.rmtree(place.path("out/run/iter_0000006"))  # as if it had been killed before the second save
    shutil.rmtree(place.path("out/hf"))
    out = place.succeed(**flags)
    assert "names step 6, but iter_0000006 is not there; taking iter_0000003, the newest complete checkpoint" in out
    assert "step 3\n" in out and "step 3/6" not in out and "step 4/6" in out and "eval at step 0" not in out
    assert timeless(place.log("run")) == log
    assert contents(place.path("out/hf")) == exported
    assert place.path("out/run/iter_0000006/__0_0.distcp").read_bytes() == checkpoint

    out = place.succeed(**flags, ckpt_step=3)  # as asked, though step 6 is there
    assert timeless(place.log("run")) == log and contents(place.path("out/hf")) == exported

    other = None if "use_distributed_optimizer" in flags else True  # on one rank there is nothing to round otherwise
    place.succeed(**flags | {"use_distributed_optimizer": other}, ckpt_step=3)
    assert timeless(place.log("run")) == log and contents(place.path("out/hf")) == exported


def test_a_run_goes_on_with_the_day_that_its_template_first_read(fresh_place: Workplace) -> None:
    place = fresh_place
    shutil.copytree(place.flags["hf_checkpoint"], place.path("model"))
    template = "<|im_start|>system\nToday: {{ strftime_now('%d %b %Y %H:%M') }}<|im_end|>\n" + CHATML
    place.path("model/chat_template.jinja").write_text(template)
    flags = {"hf_checkpoint": "model", "save": "out/run", "load": "out/run", "save_interval": 3}
    zones = {"TZ": "WEST+12"}, {"TZ": "EAST-14"}  # 26 hours apart: never the same day
    days = [(datetime.now(UTC) + timedelta(hours=hours)).date().isoformat() for hours in (-12, 14)]

    assert f"reads the clock (strftime_now), which stands at {days[0]} 00:00" in place.succeed(**flags, environment=zones[0])
    log = timeless(place.log("run"))
    shutil.rmtree(place.path("out/run/iter_0000006"))
    assert f"stands at {days[0]} 00:00" in place.succeed(**flags, environment=zones[1])
    assert timeless(place.log("run")) == log

    assert f"stands at {days[1]} 00:00" in place.succeed(
        **flags | {"load": None, "save": None, "save_interval": None}, environment=zones[1]
    )
    given = json.dumps({"strftime_now": days[1]})
    message = place.refuse(**flags, apply_chat_template_kwargs=given, environment=zones[0])
    assert message.startswith("--load out/run/iter_0000006 was trained on data ")


def test_a_finished_run_says_so_and_changes_nothing_but_a_missing_export(fresh_place: Workplace) -> None:
    place, flags = fresh_place, {"save": "out/run", "load": "out/run", "num_rollout": None, "num_epoch": 2}
    place.succeed(**flags)
    log, saved = place.log("run"), contents(place.path("out"))
    assert [line["train/consumed_pairs"] for line in log] == [8, 16, 20, 28, 36, 40]  # the last batch of an epoch is short
    place.path("out/run/.iter_0000003.tmp").mkdir()  # as a kill leaves it that comes while --keep-checkpoints deletes
    out = place.succeed(**flags, save_hf="out/hf")
    assert not place.path("out/run/.iter_0000003.tmp").exists()
    assert "step 6 of 6 is done: nothing left to train" in out and "run: dpo, 6 steps, 40 pairs" in out
    assert place.log("run") == log
    after = contents(place.path("out"))
    assert {name: after[name] for name in saved} == saved
    assert "hf/model.safetensors" in after


def test_background_saves_equal_foreground_saves(fresh_place: Workplace) -> None:
    place = fresh_place
    for name, extra in (("front", {}), ("back", {"async_save": True})):
        place.succeed(save=f"out/{name}", save_interval=1, keep_checkpoints=3, save_hf=f"out/{name}-hf", **extra)
    assert timeless(place.log("front")) == timeless(place.log("back"))
    assert weights(place, "out/front-hf") == weights(place, "out/back-hf")
    front, back = (contents(place.path(f"out/{name}")) for name in ("front", "back"))
    names = {"latest_checkpointed_iteration.txt"} | {f"iter_000000{n}/__0_0.distcp" for n in (4, 5, 6)}
    assert set(front) == set(back) > names
    assert {name: front[name] for name in names} == {name: back[name] for name in names}


def test_a_background_save_outlives_the_error_that_ends_the_run(fresh_place: Workplace) -> None:
    """Step 1 goes where step 2 finds no number; by then its checkpoint is still being written."""
    place, flags = fresh_place, {"lr": 1e30, "clip_grad": 0.0, "save_interval": 1}
    message = place.refuse(save="out/front", exp_name="front", **flags)
    assert message.startswith("step 2: the loss is nan and the gradient norm ")
    assert place.refuse(save="out/back", async_save=True, exp_name="back", **flags) == message
    front, back = (contents(place.path(f"out/{name}")) for name in ("front", "back"))
    assert set(front) == set(back) and front["iter_0000001/__0_0.distcp"] == back["iter_0000001/__0_0.distcp"]
    ended = place.run(save="out/back", load="out/back", exp_name="back", **flags)
    assert ended.error == message and ", step 1\n" in ended.out and "has no checksums" not in ended.out


@pytest.fixture(scope="module")
def uninterrupted(place: Workplace, assets: Path) -> tuple[dict[str, Any], list[dict[str, Any]], bytes]:
    """The flags of a long run, its log, and its weights."""
    write_pairs(place.path("pairs.jsonl"), 60)
    place.flags["prompt_data"] = "pairs.jsonl"
    flags = {"num_rollout": LONG, "eval_prompt_data": assets / "eval.jsonl", "eval_interval": 7, "log_interval": 100}
    place.succeed(exp_name="whole", save_hf="out/whole-hf", **flags)
    return flags, timeless(place.log("whole")), weights(place, "out/whole-hf")


def wait_for_lines(place: Workplace, running: Running, name: str, count: int) -> None:
    """Until the log has `count` lines, or the run ends."""
    path = place.path(f"log/{name}.jsonl")
    deadline = time.monotonic() + 120
    while not (running.job / "ended").exists() and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)


def test_a_signal_saves_and_the_same_command_goes_on(
    place: Workplace, uninterrupted: tuple[dict[str, Any], list[dict[str, Any]], bytes]
) -> None:
    flags, log, expected = uninterrupted
    flags = flags | {"save": "out/signals", "load": "out/signals", "save_hf": "out/signals-hf"}
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        running = place.start(**flags)
        wait_for_lines(place, running, "signals", done + 4)
        running.kill(number)
        ended = running.wait()
        assert ended.code == 128 + number, (ended.code, ended.err)
        stopped = int(place.path("out/signals/latest_checkpointed_iteration.txt").read_text())
        assert done < stopped < LONG and place.log("signals")[-1]["train/step"] == stopped
        assert f"stopped by signal {number} after step {stopped}: saved in out/signals" in ended.out
        assert "Traceback" not in ended.err
        done = stopped
    place.succeed(**flags)
    assert timeless(place.log("signals")) == log
    assert weights(place, "out/signals-hf") == expected


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_kill_loses_nothing(
    place: Workplace, uninterrupted: tuple[dict[str, Any], list[dict[str, Any]], bytes], background: bool
) -> None:
    flags, log, expected = uninterrupted
    name = f"kills-{background}"
    flags = flags | {"save": f"out/{name}", "load": f"out/{name}", "save_interval": 1, "keep_checkpoints": 2}
    flags |= {"async_save": background, "save_hf": f"out/{name}-hf"}
    moments = random.Random(int(background))
    for _ in range(4):
        running = place.start(**flags)
        known = place.path(f"log/{name}.jsonl")
        lines = known.read_bytes().count(b"\n") if known.exists() else 0
        wait_for_lines(place, running, name, lines + moments.randrange(1, 6))
        time.sleep(moments.uniform(0, 0.05))
        running.kill(signal.SIGKILL)
        assert running.wait().code in (-signal.SIGKILL, 0)
    place.succeed(**flags)
    assert timeless(place.log(name)) == log
    assert weights(place, f"out/{name}-hf") == expected
    assert not [path.name for path in place.path("out").iterdir() if path.name.startswith(f".{name}")]
    left = {path.name for path in place.path(f"out/{name}").iterdir()}
    assert left == {"latest_checkpointed_iteration.txt", f"iter_00000{LONG - 1}", f"iter_00000{LONG}"}


def test_without_save_a_signal_still_ends_the_step(place: Workplace) -> None:
    running = place.start(exp_name="unsaved", num_rollout=10_000, log_interval=10_000)
    wait_for_lines(place, running, "unsaved", 2)
    running.kill(signal.SIGTERM)
    ended = running.wait()
    assert ended.code == 143 and "nothing saved without --save" in ended.out
    assert torch.isfinite(torch.tensor(place.log("unsaved")[-1]["train/dpo/loss"]))


def test_a_flipped_bit_in_the_cache_is_told_and_changes_nothing(fresh_place: Workplace) -> None:
    """In the token file, in the description, and in a stored reference score."""
    place = fresh_place
    place.succeed(exp_name="whole")
    cache = place.path(".cache/relax")
    (table,), (entry,) = cache.glob("*.table"), (path for path in cache.iterdir() if path.is_dir())
    clean = contents(cache)
    for file, told in (
        (entry / "tokens.bin", f"{entry.relative_to(place.path('.'))}: tokens.bin is not as it was written; the rows were"),
        (entry / "meta.json", f"{entry.relative_to(place.path('.'))}: meta.json is not as it was written; the rows were"),
        (table, "reference, train: 1 stored row damaged or half written: not used\n"),
    ):
        content = bytearray(file.read_bytes())
        content[20] ^= 4  # of the first row's scores, in the table
        file.write_bytes(content)
        out = place.succeed(exp_name="run")
        assert told in out
        assert timeless(place.log("run")) == timeless(place.log("whole"))
        assert contents(cache) == clean
        assert told not in place.succeed(exp_name="run")
