"""A mixture of experts of the shape of Qwen3-30B-A3B, end to end: DPO with evaluation, checkpoints, a resume and an export."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from tests.integration.command import Workplace, timeless
from tests.integration.test_torchrun import start_ranks
from tests.models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

# 128 experts, 8 of which a token takes; 32 heads in 4 groups; a gate without bias, weights that sum to 1.
SHAPE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "router_aux_loss_coef": 0.001,
}


def test_dpo_with_experts(fresh_place: Workplace, assets: Path) -> None:
    """On one process, then its checkpoint of step 2 on two that share the experts: the same run."""
    place = fresh_place
    save_tiny(place.path("model"), "qwen3_moe", dtype=torch.bfloat16, **SHAPE)
    flags = {
        "hf_checkpoint": "model",
        "no_bf16": None,
        "eval_prompt_data": assets / "eval.jsonl",
        "num_rollout": 4,
        "moe_aux_loss_coeff": 0.001,
        "use_distributed_optimizer": True,
        "save_hf": "out/{iteration}",
    }
    place.succeed(exp_name="one", save="out/run", save_interval=2, **flags)
    one = timeless(place.log("one"))
    assert one[1]["train/dpo/loss"] == pytest.approx(math.log(2), rel=1e-14) and one[1]["train/dpo/tie_rate"] == 1
    assert all(1 <= line["train/moe_aux_loss"] < 2 for line in one[1:])
    assert one[4]["train/dpo/loss"] < one[1]["train/dpo/loss"] and one[4]["eval/dpo_loss"] < one[0]["eval/dpo_loss"]

    split = {"load": "out/run", "ckpt_step": 2, "expert_model_parallel_size": 2, "save_hf": "out/two-{iteration}"}
    first, second = (rank.wait() for rank in start_ranks(place, exp_name="two", **{**flags, **split}))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "not as in the checkpoint" not in first.out
    for expected, found in zip(one[3:], timeless(place.log("two")), strict=True):
        assert found == pytest.approx(expected, rel=0.05, abs=0.05)

    stock = transformers.AutoModelForCausalLM.from_pretrained(place.path("out/4"))
    assert stock.config.num_experts == 128 and stock.dtype == torch.bfloat16
    start = transformers.AutoModelForCausalLM.from_pretrained(place.path("model"))
    moved = {name: not torch.equal(p, q) for (name, p), q in zip(stock.named_parameters(), start.parameters(), strict=True)}
    assert all(moved.values()), moved
