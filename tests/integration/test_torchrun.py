"""Two processes under torchrun: the same numbers as one, and one message for a user's error."""

from pathlib import Path

import pytest

from tests.integration.command import Workplace, fresh, timeless, write_pairs

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


def test_a_users_error_is_printed_once(fresh_place: Workplace) -> None:
    """Rank 0 finds the bad line, the others hear of it; torchrun's own report is not ours."""
    place = fresh_place
    place.path("bad.jsonl").write_text("{}\n{\n")
    ended = fresh(place.arguments(prompt_data="bad.jsonl"), directory=place.directory, launcher=TORCHRUN)
    assert ended.code == 1
    assert ended.err.count("relax: error: ") == 1
    assert "relax: error: bad.jsonl:2: not valid JSON" in ended.err
    ours = [line for line in ended.err.splitlines() if "relax/" in line and "File " in line]
    assert not ours, ended.err
    assert not place.path("log").exists()
