"""`relax.score` end to end: every row's numbers against training's evaluation and against stock transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.integration.command import Ended, Flags, Workplace, command_line
from tests.integration.test_torchrun import start_ranks
from tests.models import TokenPair, save_tiny, stock_logps

pytestmark = pytest.mark.integration

POLICY = [f"{kind}_{side}" for kind in ("logps", "ref_logps", "reward") for side in ("chosen", "rejected")]
SHARED = {"preference_max_length": 128, "preference_max_completion_length": 64, "no_bf16": True, "device": "cpu"}
# RewardBench's columns; the third pair cannot be scored, and the last two are one.
BENCH = [
    {
        **dict(zip(("prompt", "chosen", "rejected", "subset", "id"), row, strict=True)),
        "chosen_model": "a",
        "rejected_model": "b",
    }
    for row in (
        ("2+2?", "4", "five", "math", 7),
        ("sky?", "It is blue.", "no", "chat", 8),
        ("same?", "x", "x", "chat", 9),
        ("sea?", "deep", "dry", "chat", 10),
        ("sea?", "deep", "dry", "math", "half \ud800"),  # of a surrogate pair: no UTF-8
    )
]


def score(place: Workplace, **flags: Any) -> Ended:
    """`python -m relax.score` on the shared flags, to its end."""
    arguments = list(command_line({**SHARED, **flags}))
    return place.server.start(arguments, directory=place.directory, module="relax.score").wait()


def scored(place: Workplace, output: str, **flags: Any) -> tuple[list[dict[str, Any]], str]:
    """The lines and the console of a run that must end well."""
    ended = score(place, output=output, **flags)
    assert ended.code == 0 and not ended.err, ended.err[-3000:]
    return read(place.path(output)), ended.out


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def token_pairs(model: Path, rows: Sequence[dict[str, Any]]) -> list[TokenPair]:
    """Pairs as the chat template renders them, up to the end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def ids(messages: list[dict[str, str]], **options: Any) -> np.ndarray:
        return np.array(tokenizer.apply_chat_template(messages, return_dict=False, **options))

    pairs = []
    for row in rows:
        prompt = ids(row["chosen"][:-1], add_generation_prompt=True)
        sides = (ids(row[side])[len(prompt) : -1] for side in ("chosen", "rejected"))  # without the last newline
        pairs.append(TokenPair(prompt, *sides))
    return pairs


@pytest.fixture(scope="module")
def policy(place: Workplace, assets: Path) -> tuple[list[dict[str, Any]], str]:
    """The lines and the console for a trained policy against its start."""
    place.succeed(eval_prompt_data=assets / "eval.jsonl", save="out/run", save_hf="out/hf", num_rollout=3)
    flags = {"hf_checkpoint": assets / "model", "load": "out/run", "ref_load": assets / "model"}
    return scored(place, "policy.jsonl", prompt_data=assets / "eval.jsonl", **flags)


def test_a_policys_scores_are_those_of_the_evaluation(policy: tuple[list[dict[str, Any]], str], place: Workplace) -> None:
    lines, out = policy
    assert [line["row"] for line in lines] == [1, 2, 3]
    assert all(set(line) == {"row", *POLICY, "reward_margin", "correct"} for line in lines)
    last = place.log("run")[-1]
    for name in [name for name in POLICY if not name.startswith("ref_")] + ["reward_margin"]:
        assert np.mean([line[name] for line in lines]) == pytest.approx(last[f"eval/dpo_{name}"], rel=1e-12)
    accuracy = np.mean([line["correct"] for line in lines])
    assert accuracy == last["eval/dpo_strict_accuracy"]
    header, row = out.splitlines()[-2:]
    assert header.split() == ["pairs", "reward_margin", "strict_accuracy", "tie_rate", "tie_aware_accuracy"]
    assert row.split() == ["all", "3", f"{last['eval/dpo_reward_margin']:.4f}", f"{accuracy:.4f}", "0.0000", f"{accuracy:.4f}"]


def test_a_policys_scores_are_those_of_transformers(
    policy: tuple[list[dict[str, Any]], str], place: Workplace, assets: Path
) -> None:
    lines, _ = policy
    pairs = token_pairs(assets / "model", read(assets / "eval.jsonl"))
    for prefix, directory in (("", place.path("out/hf")), ("ref_", assets / "model")):
        stock = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        expected = stock_logps(stock, pairs).view(-1, 2)
        found = torch.tensor([[line[f"{prefix}logps_chosen"], line[f"{prefix}logps_rejected"]] for line in lines])
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=0)
    for line in lines:
        assert line["reward_chosen"] == pytest.approx(0.1 * (line["logps_chosen"] - line["ref_logps_chosen"]), rel=1e-12)


def test_rows_templated_before_are_scored_as_they_are(
    policy: tuple[list[dict[str, Any]], str], place: Workplace, assets: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(assets / "model")
    rows = []
    for row in read(assets / "eval.jsonl"):
        prompt = tokenizer.apply_chat_template(row["chosen"][:-1], tokenize=False, add_generation_prompt=True)
        sides = {side: tokenizer.apply_chat_template(row[side], tokenize=False) for side in ("chosen", "rejected")}
        rows.append({"prompt": prompt, **{side: text.removeprefix(prompt) for side, text in sides.items()}})
    flags = {
        "hf_checkpoint": assets / "model",
        "load": "out/run",
        "ref_load": assets / "model",
        "prompt_data": write(place.path("templated.jsonl"), rows),
    }
    error = score(place, output="refused.jsonl", **flags).error
    assert "No pair is left" in error and "which the chat template writes itself" in error and "--no-chat-template" in error
    lines, _ = scored(place, "templated-scores.jsonl", no_chat_template=True, **flags)
    assert lines == policy[0]


def test_without_a_reference_and_on_two_ranks(policy: tuple[list[dict[str, Any]], str], place: Workplace, assets: Path) -> None:
    flags: Flags = {
        **SHARED,
        "hf_checkpoint": assets / "model",
        "load": "out/run",
        "prompt_data": [assets / "eval.jsonl", assets / "train.jsonl"],
        "dpo_beta": 0.5,
        "output": "free.jsonl",
    }
    place.path("out/run/latest_checkpointed_iteration.txt").unlink()  # what is taken instead is told once
    first, second = start_ranks(Workplace(place.server, place.directory, flags), module="relax.score")
    assert (first.wait().code, second.wait().code) == (0, 0) and not second.output()
    assert first.output().count("taking iter_0000003, the newest complete checkpoint") == 1
    lines = read(place.path("free.jsonl"))
    assert [(line["file"], line["row"]) for line in lines] == [
        *((str(assets / "eval.jsonl"), row) for row in range(1, 4)),
        *((str(assets / "train.jsonl"), row) for row in range(1, 21)),
    ]
    for line, expected in zip(lines, policy[0], strict=False):
        assert set(line) == {"file", "row", *[n for n in POLICY if not n.startswith("ref_")], "reward_margin", "correct"}
        assert line["logps_chosen"] == pytest.approx(expected["logps_chosen"], rel=1e-5)
        assert line["reward_rejected"] == pytest.approx(0.5 * expected["logps_rejected"], rel=1e-5)


def test_a_reward_model_on_rewardbenchs_rows(place: Workplace, assets: Path) -> None:
    save_tiny(place.path("rm"), "llama", head="scalar")
    write(place.path("bench.jsonl"), BENCH)
    lines, out = scored(place, "rm.jsonl", hf_checkpoint="rm", prompt_data="bench.jsonl")
    assert [line["id"] for line in lines] == [row["id"] for row in BENCH] and [line["row"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[2] == {"row": 3, "id": 9, "subset": "chat", "dropped": "identical"}
    kept = [line for line in lines if "dropped" not in line]
    assert all(
        set(line) == {"row", "id", "subset", "score_chosen", "score_rejected", "score_margin", "correct"} for line in kept
    )
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(place.path("rm"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.path("rm"))
    for line in kept:
        row = BENCH[line["row"] - 1]
        for side in ("chosen", "rejected"):
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            ids = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)])
            with torch.no_grad():
                assert line[f"score_{side}"] == pytest.approx(stock(ids).logits[0, 0].item(), rel=2e-5, abs=2e-6)
        assert line["score_margin"] == line["score_chosen"] - line["score_rejected"]
        assert line["correct"] is (line["score_margin"] > 0)
    rows = {row.split()[0]: row.split() for row in out.splitlines()[-3:]}
    assert [rows[name][1] for name in ("chat", "math", "all")] == ["2", "2", "4"]
    for name in ("chat", "math"):
        members = [line for line in kept if line["subset"] == name]
        assert rows[name][2:4] == [f"{np.mean([line[key] for line in members]):.4f}" for key in ("score_margin", "correct")]
    assert "columns with content that nothing uses: chosen_model (5 rows), rejected_model (5 rows)" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hf_checkpoint": None}, "--hf-checkpoint is required"),
        ({"output": "bench.jsonl"}, "--output bench.jsonl exists"),
        ({"ckpt_step": 3}, "--ckpt-step needs --load"),
        ({"load": "none"}, "--load none: no complete checkpoint there"),
        ({"ref_load": "rm"}, "--ref-load has no effect: the weights are a reward model's"),
        ({"hf_checkpoint": "out/hf", "dpo_beta": 0}, "--dpo-beta must be a finite number above 0"),
        ({"subset_key": "kind"}, "--subset-key kind: no row has a value there"),
        ({"world_size": 2}, "unknown flag --world-size"),
    ],
)
def test_what_cannot_be_scored_is_said(place: Workplace, flags: Flags, message: str) -> None:
    base: Flags = {"hf_checkpoint": "rm", "prompt_data": "bench.jsonl", "output": "new.jsonl"}
    assert score(place, **{**base, **flags}).error.startswith(message)
    assert not place.path("new.jsonl").exists()
