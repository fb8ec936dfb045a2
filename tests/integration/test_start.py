"""Where a policy starts, and which checkpoints a run refuses to go on from: every refusal leaves all files as they were."""

import fcntl
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.command import Workplace, command_line, contents, write_pairs
from tests.models import save_tiny

pytestmark = pytest.mark.integration

LN2 = pytest.approx(math.log(2), rel=1e-14)


@pytest.fixture(scope="module")
def trained(place: Workplace, assets: Path) -> Workplace:
    """out/dpo and out/rm with steps 2 and 4 of 4, and other/, a model with other weights."""
    place.flags["num_rollout"] = 4
    place.flags["eval_prompt_data"] = assets / "eval.jsonl"
    for loss in ("dpo", "rm"):
        place.succeed(loss_type=loss, save=f"out/{loss}", save_interval=2)
    save_tiny(place.path("other"), "qwen3", seed=1)
    return place


def policy(line: dict[str, Any]) -> float:
    """A number that tells policies apart."""
    return float(line["eval/dpo_logps_chosen"])


def start_of(place: Workplace, **flags: Any) -> dict[str, Any]:
    """The metrics that a run logs first."""
    place.succeed(exp_name="start", **{"num_rollout": 1, **flags})
    return place.log("start")[0]


def test_the_policy_starts_from_load_else_ref_load_else_hf_checkpoint(trained: Workplace) -> None:
    place, after = trained, {line["train/step"]: line for line in trained.log("dpo")}
    model, other = start_of(place), start_of(place, ref_load="other")
    assert policy(model) == policy(after[0]) != policy(other)
    for start in (model, other):
        assert start["eval/dpo_loss"] == LN2
    four = start_of(place, ref_load="out/dpo")  # a Megatron checkpoint's latest step
    assert policy(four) == pytest.approx(policy(after[4]), rel=1e-9) and four["eval/dpo_loss"] == LN2
    two = start_of(place, ref_load="out/dpo", ref_ckpt_step=2)
    assert policy(two) != policy(four) and two["eval/dpo_loss"] == LN2
    tuned = start_of(place, load="out/dpo", finetune=True)  # weights alone, against the model as reference
    assert policy(tuned) == policy(four) and tuned["eval/dpo_loss"] == pytest.approx(after[4]["eval/dpo_loss"], rel=1e-9)
    assert tuned["train/step"] == 0
    both = start_of(place, load="out/dpo", ckpt_step=2, finetune=True, ref_load="other")
    assert policy(both) == policy(two) and both["eval/dpo_loss"] != LN2


def test_a_reward_model_starts_from_a_policy_of_either_kind(trained: Workplace) -> None:
    bases = [start_of(trained, loss_type="rm", ref_load=source) for source in (None, "out/dpo", "out/rm")]
    assert bases[0] == trained.log("rm")[0] != bases[1]
    assert bases[2]["eval/rm_loss"] == pytest.approx(trained.log("rm")[-1]["eval/rm_loss"], rel=1e-9)


def refuses(place: Workplace, **flags: Any) -> str:
    """The message of a run that is refused before it changes any file that another run made."""
    before = {name: content for name, content in contents(place.directory).items() if not name.startswith(".cache/")}
    message = place.refuse(**flags)
    after = contents(place.directory)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after.keys() - before.keys() if not name.startswith(".cache/")]
    return message


def test_another_reference_is_refused(trained: Workplace) -> None:
    place = trained
    shutil.copytree(place.flags["hf_checkpoint"], place.path("changed"))
    tensors = load_file(place.path("changed/model.safetensors"))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 2**-10  # one weight
    save_file(tensors, place.path("changed/model.safetensors"), metadata={"format": "pt"})
    resume = {"save": "out/dpo", "load": "out/dpo", "num_rollout": 6}
    message = refuses(place, ref_load="changed", **resume)
    saved = json.loads(place.path("out/dpo/iter_0000004/relax_dpo_reference.json").read_text())
    assert message.startswith("--load out/dpo/iter_0000004 was trained against the reference ")
    assert f"(sha256 {saved['sha256'][:16]}), but --ref-load gives changed (sha256 " in message
    assert ": different weights in 1 of " in message
    assert "tensors, first model.layers.1.mlp.up_proj.weight; give the same reference, or --finetune" in message
    copied = place.path("copied")  # the same weights from elsewhere are the same reference
    shutil.copytree(place.flags["hf_checkpoint"], copied)
    shutil.copytree(place.path("out/dpo"), place.path("out/moved"))
    assert "step 5/6" in place.succeed(ref_load="copied", save="out/moved", load="out/moved", num_rollout=6)


def test_other_data_are_refused_with_both_fingerprints(trained: Workplace, assets: Path) -> None:
    place, resume = trained, {"save": "out/dpo", "load": "out/dpo", "num_rollout": 6}
    write_pairs(place.path("others.jsonl"), 20, seed=5)
    saved = json.loads(place.path("out/dpo/iter_0000004/relax_run.json").read_text())["data_fingerprint"]
    message = refuses(place, prompt_data="others.jsonl", **resume)
    start = f"--load out/dpo/iter_0000004 was trained on data {saved[:16]} (20 pairs), but --prompt-data gives "
    assert message.startswith(start) and message.endswith("give the same data and limits, or --finetune")
    found = message.removeprefix(start)[:16]
    assert found != saved[:16] and set(found) <= set("0123456789abcdef")
    limits = refuses(place, preference_max_completion_length=5, **resume)  # the same file, cut otherwise
    assert limits.startswith(start)
    shutil.copy(assets / "train.jsonl", place.path("renamed.jsonl"))
    out = place.succeed(prompt_data="renamed.jsonl", exp_name="renamed", load="out/dpo", num_rollout=5)
    assert "step 5/5" in out


@pytest.mark.parametrize(("loss", "other", "held"), [("dpo", "rm", "a reward model"), ("rm", "dpo", "a language model")])
def test_a_checkpoint_of_another_objective_is_refused(trained: Workplace, loss: str, other: str, held: str) -> None:
    message = refuses(trained, loss_type=loss, load=f"out/{other}", num_rollout=6)
    assert message == (
        f"--load out/{other}/iter_0000004 holds {held} trained with --loss-type {other}, but this run has --loss-type {loss}; "
        "give another --load, or the matching --loss-type"
    )


def test_a_policy_has_no_reward_models_start(trained: Workplace) -> None:
    message = refuses(trained, ref_load="out/rm")
    assert message == "--ref-load out/rm/iter_0000004: a reward model's checkpoint; a policy needs one with an output layer"


@pytest.mark.parametrize(
    ("state", "what"), [("optim", "optimizer state"), ("rng", "random number states")], ids=["optimizer", "rng"]
)
def test_partial_state_needs_the_matching_flag(trained: Workplace, state: str, what: str) -> None:
    place, save = trained, f"out/no-{state}"
    place.succeed(save=save, **{f"no_save_{state}": True})
    message = refuses(place, load=save, num_rollout=6)
    assert message == (
        f"--load {save}/iter_0000004 has no {what}; resume without it by --no-load-{state}, or start anew with --finetune"
    )
    out = place.succeed(exp_name=f"on-{state}", load=save, num_rollout=6, **{f"no_load_{state}": True})
    assert "step 5/6" in out and "step 6/6" in out


@pytest.mark.parametrize(
    ("changed", "what", "flag"),
    [
        ({"global_batch_size": 8}, "global batch size 4, but this run has 8", "--global-batch-size"),
        ({"seed": 7}, "seed 42, but this run has 7", "--seed"),
        ({"no_shuffle": True}, "shuffle True, but this run has False", "--no-shuffle"),
        ({"no_bf16": True}, "bf16 True, but this run has False", "--bf16"),
        ({"dpo_loss": "hinge"}, "dpo loss sigmoid, but this run has hinge", "--dpo-loss"),
        ({"dpo_f_divergence": "js"}, "dpo f divergence reverse_kl, but this run has js", "--dpo-f-divergence"),
    ],
)
def test_a_run_goes_on_only_with_its_order_dtype_and_loss(trained: Workplace, changed: Any, what: str, flag: str) -> None:
    save = f"out/run{flag}"
    given = {"global_batch_size": 4, "bf16": True, "load": save, "save": save}
    trained.succeed(exp_name=f"run{flag}", num_rollout=1, **given)
    if "no_bf16" in changed:
        del given["bf16"]
    message = refuses(trained, num_rollout=6, **{**given, **changed})
    assert message == (
        f"--load {save}/iter_0000001 was trained with {what}: it could not continue; give the same {flag}, or --finetune "
        "for a new run"
    )


def test_a_run_against_a_reference_does_not_go_on_without(trained: Workplace) -> None:
    message = refuses(trained, load="out/dpo", num_rollout=6, dpo_reference_free=True)
    assert message == (
        "--load out/dpo/iter_0000004 was trained against a reference, but this run has none; leave out --dpo-reference-free, "
        "or give --finetune for a new run"
    )


def test_a_new_run_leaves_another_runs_checkpoints_alone(trained: Workplace) -> None:
    for load in ({}, {"load": "out/typo"}):
        message = refuses(trained, save="out/dpo", keep_checkpoints=1, num_rollout=2, **load)
        assert message == (
            "--save out/dpo already holds checkpoints, the latest of step 4: --load out/dpo resumes them; for a new run choose "
            "another directory"
        )


def test_two_runs_do_not_save_into_one_directory(trained: Workplace) -> None:
    """Said before anything that takes time."""
    directory = trained.path("out/dpo")
    held = os.open(directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        ended = trained.run(load="out/dpo", save="out/dpo", num_rollout=6)
    finally:
        os.close(held)
    assert ended.error == "--save out/dpo is in use by another run; wait for it, or choose another directory"
    assert "rows kept" not in ended.out and "reference, train" not in ended.out


def test_a_changed_schedule_is_printed_and_wins(trained: Workplace) -> None:
    changes = {"lr": 5e-4, "lr_decay_style": "constant", "dpo_beta": 0.2, "clip_grad": 0.5}
    out = trained.succeed(exp_name="lr", load="out/dpo", num_rollout=6, **changes)
    assert "not as in the checkpoint: --dpo-beta 0.1 -> 0.2\n" in out
    assert "not as in the checkpoint: --clip-grad 1.0 -> 0.5\n" in out
    assert "the schedule changed: max_lr 0.001 -> 0.0005\n" in out
    assert "the schedule changed: lr_decay_style cosine -> constant\n" in out
    assert [line["train/lr"] for line in trained.log("lr")] == [5e-4, 5e-4]


def test_no_such_step(trained: Workplace) -> None:
    assert refuses(trained, load="out/dpo", ckpt_step=3) == "--ckpt-step 3: out/dpo holds iterations [2, 4]"
    assert refuses(trained, ref_load="out/dpo", ref_ckpt_step=3) == "--ref-ckpt-step 3: out/dpo holds iterations [2, 4]"


def test_an_unfinished_save_is_no_checkpoint(fresh_place: Workplace) -> None:
    fresh_place.path("out/.iter_0000003.tmp").mkdir(parents=True)
    out = fresh_place.succeed(save="out", load="out", num_rollout=1)
    assert "--load out: no complete checkpoint, only unfinished saves (.iter_0000003.tmp)" in out and "step 1/1" in out


def test_an_incomplete_checkpoint_gives_way_to_the_one_before(trained: Workplace) -> None:
    place = trained
    shutil.copytree(place.path("out/dpo"), place.path("out/damaged"))
    file = place.path("out/damaged/iter_0000004/__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    out = place.succeed(exp_name="damaged", load="out/damaged")
    assert "--load out/damaged: iter_0000004 is incomplete: its file __0_0.distcp has " in out
    assert "taking iter_0000002, the newest complete checkpoint" in out and "step 3/4" in out
    shutil.rmtree(place.path("out/damaged/iter_0000002"))
    message = refuses(place, load="out/damaged")
    assert "has no complete checkpoint left" in message and "restore one, or remove the directory" in message


FLAGS_OF_A_LOAD: dict[str, dict[str, Any]] = {
    "relax.train": {"load": "out/forged", "num_rollout": 6},
    "relax.train --ref-load": {"ref_load": "out/forged"},
    "relax.score": {"load": "out/forged", "output": "scores.jsonl"},
    "relax.score --ref-load": {"ref_load": "out/forged", "output": "scores.jsonl"},
    "relax.convert mcore-to-hf": {"load": "out/forged", "save": "out/converted"},
    "relax.convert verify": {"load": "out/forged"},
}


@pytest.mark.parametrize("command", FLAGS_OF_A_LOAD)
def test_every_command_refuses_a_damaged_and_a_forged_checkpoint(trained: Workplace, command: str) -> None:
    """Nothing runs, nothing is written, and damage never makes a run fall back to an earlier step."""
    place, marker = trained, trained.path("marker")
    module, *words = command.split()
    flags = FLAGS_OF_A_LOAD[command]
    flag = "--ref-load" if "ref_load" in flags else "--load"
    shutil.rmtree(place.path("out/forged"), ignore_errors=True)
    shutil.copytree(place.path("out/dpo"), place.path("out/forged"))
    path = Path("out/forged/iter_0000004")

    def refused() -> str:
        if module == "relax.train":
            return refuses(place, exp_name="forged", **flags)
        own = {"hf_checkpoint": place.flags["hf_checkpoint"], **flags}
        if module == "relax.score":
            own |= {
                "prompt_data": place.flags["prompt_data"],
                "preference_max_length": 128,
                "preference_max_completion_length": 64,
            }
        argv = [word for word in words if not word.startswith("-")] + list(command_line(own))
        return place.server.start(argv, directory=place.directory, module=module).wait().error

    tensors = place.path(f"{path}/__0_0.distcp")
    content = bytearray(tensors.read_bytes())
    extent = json.loads(place.path(f"{path}/checksums.json").read_text())["tensors"]["__0_0.distcp"]
    for offset in map(int, extent):
        content[offset + 1000] ^= 1
    tensors.write_bytes(content)
    message = refused()
    assert message.startswith(f"{flag} {path} is damaged: its file __0_0.distcp does not hold what was saved (the checksum of ")
    step_flag = "--ref-ckpt-step" if flag == "--ref-load" else "--ckpt-step"
    assert message.endswith(f"; {flag} out/forged {step_flag} 2 takes the newest complete checkpoint before it")

    place.path(f"{path}/checksums.json").unlink()
    place.path(f"{path}/.metadata").write_bytes(f"\x80cposix\nmkdir\n(V{marker}\ntR.".encode("latin-1"))
    assert refused().startswith((f"{path}/.metadata asks for posix.mkdir: ", f"{flag} {path} is damaged: its .metadata cannot"))
    assert not marker.exists() and not place.path("out/converted").exists() and not place.path("scores.jsonl").exists()
