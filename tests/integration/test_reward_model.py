"""Reward models end to end: the files, metrics and export of one command, and how a head comes to be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.integration.command import Workplace, timeless

pytestmark = pytest.mark.integration

PAIR_METRICS = [
    "loss", "score_chosen", "score_rejected", "score_margin", "strict_accuracy", "tie_rate", "tie_aware_accuracy",
]  # fmt: skip


@pytest.fixture(scope="module")
def log(place: Workplace, assets: Path) -> list[dict[str, Any]]:
    """A run of six steps with everything it can write; its log."""
    place.flags["loss_type"] = "rm"
    place.succeed(eval_prompt_data=assets / "eval.jsonl", save="out/run", save_interval=3, save_hf="out/hf")
    return place.log("run")


def test_every_metric_has_its_name(log: list[dict[str, Any]]) -> None:
    evaluated = {f"eval/rm_{name}" for name in [*PAIR_METRICS, "num_pairs"]}
    trained = {f"train/rm/{name}" for name in PAIR_METRICS}
    trained |= {f"train/{name}" for name in ("lr", "grad_norm", "step", "epoch", "consumed_pairs")}
    assert [line["train/step"] for line in log] == [0, 1, 2, 3, 4, 5, 6]
    assert set(log[0]) == evaluated | {"train/step"}
    for line in timeless(log)[1:]:
        assert set(line) == trained | (evaluated if line["train/step"] == 6 else set())
    assert log[0]["eval/rm_num_pairs"] == 3


def test_the_loss_starts_near_ln_2_and_falls(log: list[dict[str, Any]]) -> None:
    assert abs(log[1]["train/rm/loss"] - math.log(2)) < 0.1
    assert log[6]["train/rm/loss"] < log[1]["train/rm/loss"] - 0.1
    for line in log[1:]:
        margin = line["train/rm/score_chosen"] - line["train/rm/score_rejected"]
        assert line["train/rm/score_margin"] == pytest.approx(margin, rel=1e-9)


def test_the_checkpoint_records_its_head_and_no_reference(log: list[dict[str, Any]], place: Workplace) -> None:
    checkpoint = place.path("out/run/iter_0000003")
    record = json.loads((checkpoint / "relax_run.json").read_text())
    assert (record["loss_type"], record["head"], record["step"], record["consumed_pairs"]) == ("rm", "scalar", 3, 20)
    assert not (checkpoint / "relax_dpo_reference.json").exists()


def test_the_export_scores_as_the_run_did(log: list[dict[str, Any]], place: Workplace, assets: Path) -> None:
    export = place.path("out/hf")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id == 257
    rows = [json.loads(line) for line in (assets / "eval.jsonl").read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row["chosen"], tokenize=False) for row in rows]
    with torch.no_grad():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert scores.mean().item() == pytest.approx(log[6]["eval/rm_score_chosen"], abs=1e-5)


def test_the_head_is_the_seeds_alone(log: list[dict[str, Any]], place: Workplace) -> None:
    """Which data or length a run has does not matter; another seed gives another head."""
    heads = []
    for name, seed in (("one", 42), ("two", 42), ("three", 43)):
        place.succeed(exp_name=name, save_hf=f"out/{name}", num_rollout=1, lr=1e-30, seed=seed, global_batch_size=1 + len(name))
        heads.append(load_file(place.path(f"out/{name}/model.safetensors"))["score.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].shape == (1, 48) and 0.01 < heads[0].std() < 0.03


def test_a_reward_model_goes_on_from_an_export(log: list[dict[str, Any]], place: Workplace, assets: Path) -> None:
    """--ref-load may be a reward model: its head comes along."""
    place.succeed(exp_name="on", ref_load="out/hf", num_rollout=1, eval_prompt_data=assets / "eval.jsonl")
    found, expected = place.log("on")[0], log[6]
    for name in PAIR_METRICS:
        assert found[f"eval/rm_{name}"] == pytest.approx(expected[f"eval/rm_{name}"], rel=1e-6)


def test_margins_of_rows_count(log: list[dict[str, Any]], place: Workplace, assets: Path) -> None:
    rows = [json.loads(line) | {"margin": 2.0} for line in (assets / "train.jsonl").read_text().splitlines()]
    place.path("margins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.succeed(exp_name="margins", num_rollout=1, prompt_data="margins.jsonl")
    found = place.log("margins")[0]
    assert found["train/rm/score_margin"] == pytest.approx(log[1]["train/rm/score_margin"], rel=1e-9)
    assert found["train/rm/loss"] == pytest.approx(math.log1p(math.exp(2.0)), abs=0.1)
