"""Two processes under torchrun: the same numbers as one, one message for a user's error, and patience with one rank's work."""

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import Running, Workplace, fresh, timeless, write_pairs

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_two_processes_give_the_losses_of_one(fresh_place: Workplace, assets: Path) -> None:
    """10 pairs in batches of 8: the second step has one pair for each rank."""
    place = fresh_place
    write_pairs(place.path("ten.jsonl"), 10)
    flags = {
        "prompt_data": "ten.jsonl",
        "eval_prompt_data": assets / "eval.jsonl",
        "num_rollout": 4,
        "save_hf": "out/{iteration}",
    }
    place.succeed(exp_name="one", **flags)
    arguments = place.arguments(exp_name="two", save="out/two", save_interval=2, **flags)
    ended = fresh(arguments, directory=place.directory, launcher=TORCHRUN)
    assert ended.code == 0, ended.err
    assert ended.out.count("train: 10 of 10 rows kept") == 1 and ended.out.count("two: dpo, 4 steps, 20 pairs") == 1
    one, two = timeless(place.log("one")), timeless(place.log("two"))
    assert len(one) == len(two) == 5
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)

    place.succeed(exp_name="on", load="out/two", ckpt_step=2, **flags)  # one process goes on from two
    for expected, found in zip(one[3:], timeless(place.log("on")), strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def start_ranks(place: Workplace, **flags: Any) -> list[Running]:
    """Two ranks as torchrun starts them, each with its own output, exit code and process to send signals to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [place.start(environment={"RANK": rank, "LOCAL_RANK": rank, **shared}, **flags) for rank in ("0", "1")]


def test_a_users_error_is_told_by_rank_0_alone(fresh_place: Workplace) -> None:
    """Rank 0 finds the bad line, the other hears of it; both find the missing file."""
    fresh_place.path("bad.jsonl").write_text("{}\n{\n")
    for name, message in (("bad.jsonl", "bad.jsonl:2: not valid JSON"), ("none.jsonl", "--prompt-data none.jsonl does not")):
        first, second = (rank.wait() for rank in start_ranks(fresh_place, prompt_data=name))
        assert first.error.startswith(message)
        assert (second.code, second.out, second.err) == (2, "", "")
    assert not fresh_place.path("log").exists()


def test_a_signal_to_one_rank_stops_all_after_the_same_step(fresh_place: Workplace) -> None:
    place, flags = fresh_place, {"num_rollout": 40, "log_interval": 100, "save": "out/run", "load": "out/run"}
    for rank in start_ranks(place, exp_name="whole", num_rollout=40):
        assert rank.wait().code == 0
    first, second = start_ranks(place, **flags)
    while not (path := place.path("log/run.jsonl")).exists() or path.read_bytes().count(b"\n") < 3:
        assert not (first.job / "ended").exists()
        time.sleep(0.002)
    second.kill(signal.SIGTERM)
    first, second = first.wait(), second.wait()
    assert (first.code, second.code) == (143, 143) and not second.out and not first.err + second.err
    stopped = int(place.path("out/run/latest_checkpointed_iteration.txt").read_text())
    assert stopped < 40 and f"stopped by signal 15 after step {stopped}: saved in out/run" in first.out
    for rank in start_ranks(place, **flags):
        assert rank.wait().code == 0
    assert timeless(place.log("run")) == timeless(place.log("whole"))


def test_two_ranks_finish_a_background_save_behind_an_error(fresh_place: Workplace) -> None:
    """Both find that step 2 has no number, while both still write their part of step 1."""
    place, flags = fresh_place, {"lr": 1e30, "clip_grad": 0.0, "save_interval": 1, "async_save": True}
    flags |= {"save": "out/run", "load": "out/run"}
    for _ in range(2):  # and the same command goes on from there
        first, second = (rank.wait() for rank in start_ranks(place, **flags))
        assert first.error.startswith("step 2: the loss is nan and the gradient norm ")
        assert (second.code, second.err) == (2, "")
        left = {path.name for path in place.path("out/run").iterdir()}
        assert left == {"iter_0000001", "latest_checkpointed_iteration.txt"}
    assert ", step 1\n" in first.out


def test_one_ranks_work_may_take_longer_than_a_collective_operation(fresh_place: Workplace) -> None:
    place = Workplace(fresh_place.server, fresh_place.directory, {})
    ranks = [rank.wait() for rank in start_ranks(place, module="tests.integration.slow_rank")]
    assert [(rank.code, rank.out, rank.err) for rank in ranks] == [(0, "done\n", "")] * 2
