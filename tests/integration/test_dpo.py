"""DPO end to end: the files, metrics and console of one command, and what a second one finds ready."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.integration.command import Ended, Workplace, fresh, timeless
from tests.models import save_tiny

pytestmark = pytest.mark.integration

PAIR_METRICS = [
    "loss", "logps_chosen", "logps_rejected", "ref_logps_chosen", "ref_logps_rejected", "reward_chosen", "reward_rejected",
    "reward_margin", "strict_accuracy", "tie_rate", "tie_aware_accuracy", "chosen_fell_rate",
]  # fmt: skip
PERF = [
    "step_time_s", "pairs_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "packing_efficiency", "peak_memory_gib",
    "data_wait_s",
]  # fmt: skip
TRAIN_KEYS = {f"train/dpo/{name}" for name in PAIR_METRICS} | {f"perf/{name}" for name in PERF}
TRAIN_KEYS |= {f"train/{name}" for name in ("lr", "grad_norm", "step", "epoch", "consumed_pairs")}
EVAL_NAMES = [f"dpo_{name}" for name in PAIR_METRICS if not name.startswith("ref_")] + ["dpo_num_pairs"]
EVAL_KEYS = {f"eval/{name}" for name in EVAL_NAMES} | {f"eval/held/{name}" for name in EVAL_NAMES}


@dataclass(frozen=True, slots=True)
class Done:
    """A run that ended, where it ran, and its log."""

    ended: Ended
    place: Workplace
    log: list[dict[str, Any]]


@pytest.fixture(scope="module")
def bf16(place: Workplace, assets: Path) -> Done:
    """The command as a shell starts it, in bf16, with two evaluation sets, checkpoints and exports."""
    arguments = place.arguments(
        no_bf16=None,
        eval_prompt_data=assets / "eval.jsonl",
        eval_interval=2,
        save="out/run",
        load="out/run",
        save_interval=2,
        keep_checkpoints=2,
        save_hf="out/hf-{iteration}",
    )
    ended = fresh([*arguments, "--eval-prompt-data", "held", str(assets / "train.jsonl")], directory=place.directory)
    assert ended.code == 0, ended.err
    return Done(ended, place, place.log("run"))


def test_every_metric_has_its_name(bf16: Done) -> None:
    assert [line["train/step"] for line in bf16.log] == [0, 1, 2, 3, 4, 5, 6]
    assert set(bf16.log[0]) == EVAL_KEYS | {"train/step"}
    for line in bf16.log[1:]:
        assert set(line) == TRAIN_KEYS | (EVAL_KEYS if line["train/step"] in (2, 4, 6) else set())
        assert all(math.isfinite(value) for value in line.values())
    assert bf16.log[0]["eval/dpo_num_pairs"] == 3 and bf16.log[6]["eval/held/dpo_num_pairs"] == 20


def test_evaluation_pairs_that_are_trained_on_are_told(bf16: Done) -> None:
    assert "20 of 20 evaluation pairs are in the training set, too (first: pair 1)" in bf16.ended.out
    report = json.loads((bf16.place.directory / "log" / "run" / "data_report.json").read_text())
    assert len(report["eval held"]["notes"]) == 1 and report["eval"]["notes"] == []


def test_policy_and_reference_agree_until_the_first_step(bf16: Done) -> None:
    first = bf16.log[1]
    for side in ("chosen", "rejected"):
        assert first[f"train/dpo/logps_{side}"] == first[f"train/dpo/ref_logps_{side}"]
    assert first["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-14) and first["train/dpo/tie_rate"] == 1
    assert bf16.log[0]["eval/dpo_reward_margin"] == 0 and bf16.log[0]["eval/dpo_tie_aware_accuracy"] == 0.5


def test_training_learns_and_counts_epochs_of_three_steps(bf16: Done) -> None:
    assert bf16.log[6]["eval/held/dpo_loss"] < 0.5 and bf16.log[6]["eval/held/dpo_strict_accuracy"] > 0.9
    assert [line["train/consumed_pairs"] for line in bf16.log[1:]] == [8, 16, 20, 28, 36, 40]
    assert [line["train/epoch"] for line in bf16.log[1:]] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert [line["train/lr"] for line in bf16.log[1:]] == pytest.approx(
        [5e-4 * (1 + math.cos(math.pi * n / 6)) for n in range(6)]
    )


def test_a_run_leaves_the_files_of_the_contract(bf16: Done) -> None:
    save = bf16.place.path("out/run")
    assert {path.name for path in save.iterdir()} == {"latest_checkpointed_iteration.txt", "iter_0000004", "iter_0000006"}
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "6"
    files = {path.name for path in (save / "iter_0000006").iterdir()}
    small = {"common.pt", "metadata.json", ".metadata", "relax_run.json", "relax_dpo_reference.json", "checksums.json"}
    assert files == small | {"__0_0.distcp"}
    common = torch.load(save / "iter_0000006/common.pt", weights_only=True)
    assert common["step"] == 6 and common["scheduler"]["num_steps"] == 6
    log = bf16.place.path("log")
    assert {path.name for path in log.iterdir()} == {"run", "run.jsonl"}
    assert (log / "run/curves.png").read_bytes().startswith(b"\x89PNG") and (log / "run/data_report.json").exists()


def test_the_checkpoint_says_what_was_trained(bf16: Done, assets: Path) -> None:
    record = json.loads(bf16.place.path("out/run/iter_0000004/relax_run.json").read_text())
    facts = {name: record[name] for name in ("loss_type", "head", "step", "consumed_pairs", "num_pairs")}
    assert facts == {"loss_type": "dpo", "head": "lm", "step": 4, "consumed_pairs": 28, "num_pairs": 20}
    assert record["arguments"]["lr"] == 1e-3 and record["arguments"]["prompt_data"] == [str(assets / "train.jsonl")]
    assert len(record["data_fingerprint"]) == 64 and record["versions"]["torch"] == torch.__version__
    reference = json.loads(bf16.place.path("out/run/iter_0000004/relax_dpo_reference.json").read_text())
    assert set(reference) == {"source", "step", "sha256", "dtype", "tensors"}
    assert (reference["source"], reference["step"], reference["dtype"]) == (str(assets / "model"), None, "bfloat16")
    assert set(reference["tensors"]) == set(load_file(assets / "model/model.safetensors"))
    assert all(len(digest) == 64 for digest in [reference["sha256"], *reference["tensors"].values()])


def test_the_data_report_counts_every_row(bf16: Done) -> None:
    report = json.loads(bf16.place.path("log/run/data_report.json").read_text())
    assert set(report) == {"train", "eval", "eval held"}
    assert (report["train"]["rows_read"], report["train"]["rows_kept"], report["eval"]["rows_kept"]) == (20, 20, 3)
    assert report["train"]["files"][0]["format"] == "implicit_prompt"


def test_the_console_tells_the_story_once(bf16: Done) -> None:
    out = bf16.ended.out
    for text in (
        "--load out/run: no checkpoint yet, the directory is empty",  # --save out/run was claimed
        "train: 20 of 20 rows kept",
        "reference, train: 20 pairs scored",
        "reference, eval: 3 pairs scored",
        "attention: sdpa (variable-length kernels need a GPU)",
        "elementwise work: ",
        "eval at step 0: loss 0.6931, accuracy 0.500, margin +0.0000",
        "step 1/6: loss 0.6931",
        "step 6/6: ",
        "run: dpo, 6 steps, 40 pairs",
        "evaluation held (20 pairs)",
    ):
        assert out.count(text) == 1, text
    assert "Traceback" not in bf16.ended.err and "Error" not in bf16.ended.err, bf16.ended.err


def test_the_export_is_a_policy_for_transformers(bf16: Done, assets: Path) -> None:
    assert {path.name for path in bf16.place.path("out").iterdir()} == {"run", "hf-2", "hf-4", "hf-6"}
    export = bf16.place.path("out/hf-6")
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert model.dtype == torch.bfloat16 and tokenizer.chat_template
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), 272)
    start = load_file(assets / "model/model.safetensors")
    changed = [
        name for name, tensor in load_file(export / "model.safetensors").items() if not tensor.equal(start[name].bfloat16())
    ]
    assert len(changed) > len(start) // 2


def test_fp32_finds_the_table_that_an_earlier_run_filled(bf16: Done, assets: Path) -> None:
    """A sweep over learning rates pays for the reference once; other numerics do not share its table."""
    place, sets = bf16.place, {"eval_prompt_data": assets / "eval.jsonl"}
    first = place.succeed(exp_name="first", num_rollout=3, **sets)
    assert "reference, train: 20 pairs scored" in first and "reference, eval: 3 pairs scored" in first
    again = place.succeed(exp_name="again", num_rollout=3, **sets)
    higher = place.succeed(exp_name="higher", num_rollout=3, lr=2e-3, **sets)
    for out in (again, higher):
        assert "reference, train: 0 pairs scored" in out and "reference, eval: 0 pairs scored" in out
    logs = {name: timeless(place.log(name)) for name in ("first", "again", "higher")}
    assert logs["first"] == logs["again"] != logs["higher"]
    assert logs["first"][1]["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-14)
    assert logs["first"][1]["train/dpo/loss"] == logs["higher"][1]["train/dpo/loss"]
    assert abs(bf16.log[1]["train/dpo/logps_chosen"] - logs["first"][1]["train/dpo/logps_chosen"]) < 0.5


def test_the_table_is_another_references_or_no_ones(bf16: Done, tmp_path: Path) -> None:
    save_tiny(tmp_path / "other", "qwen3", seed=1)
    out = bf16.place.succeed(exp_name="other", num_rollout=3, ref_load=tmp_path / "other")
    assert "reference, train: 20 pairs scored" in out
    first = bf16.place.log("other")[0]  # the policy starts from --ref-load, too
    assert first["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-14)


def test_without_a_reference_rewards_are_scaled_log_probabilities(place: Workplace, assets: Path) -> None:
    place.succeed(
        exp_name="free",
        num_rollout=2,
        dpo_reference_free=True,
        dpo_beta=0.2,
        eval_prompt_data=assets / "eval.jsonl",
        save="out/free",
    )
    log = place.log("free")
    assert not [key for line in log for key in line if "ref_" in key]
    for line in log[1:]:
        reward, logps = line["train/dpo/reward_chosen"], line["train/dpo/logps_chosen"]
        assert reward == pytest.approx(0.2 * logps, rel=1e-12)
    assert np.isclose(log[0]["eval/dpo_reward_rejected"], 0.2 * log[0]["eval/dpo_logps_rejected"], rtol=1e-12)
    assert not place.path("out/free/iter_0000002/relax_dpo_reference.json").exists()
