"""Mixture of experts: the router and the experts against transformers, the balancing loss against its definition."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.backend.device import on_device
from relax.backend.model.families import model_shape, read_hf_config
from relax.errors import UserError
from relax.packing import MicroBatch, StepPlan, plan_step
from tests.engines import (
    CPU,
    OPTIONS,
    assert_near,
    assert_same,
    gradients,
    lengths_of,
    make_batch,
    make_engine,
    make_pairs,
    parameters,
)
from tests.models import TokenPair, load, save_tiny, scores, stock_logps, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_process")

FAMILY, COEFFICIENT = "qwen3_moe", 0.3
SIZES = [(7, 5, 9), (12, 1, 4), (1, 6, 6), (20, 3, 1), (4, 8, 2), (16, 7, 7), (9, 2, 11)]
LOSSES = ("dpo", "rm")
HEADS = {"dpo": "lm", "rm": "scalar"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for loss in LOSSES:
        save_tiny(root / loss, FAMILY, head=HEADS[loss])
    return {loss: root / loss for loss in LOSSES}


@pytest.fixture
def step(directories: dict[str, Path]) -> Callable[..., Any]:
    """One step of a fresh engine, against a reference that no policy here is: (engine, its result)."""

    def run(loss: str, *, plan: StepPlan | None = None, distributed: bool = False, **overrides: Any) -> tuple[Any, Any]:
        options = replace(OPTIONS, distributed=distributed, overlap=distributed)
        engine = make_engine(directories[loss], loss, options=options, **overrides)
        references = np.full((len(SIZES), 2), -30, dtype=np.float32) if loss == "dpo" else None
        return engine, engine.train_step(make_batch(make_pairs(SIZES), plan=plan, references=references))

    return run


# Routing and experts


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_the_experts_that_transformers_gives_it(tmp_path: Path, dtype: torch.dtype, normalized: bool) -> None:
    """Bit for bit, ties that rounding makes included."""
    stock = save_tiny(tmp_path, FAMILY, dtype=dtype, num_experts=64, num_experts_per_tok=8, norm_topk_prob=normalized)
    rows = torch.randn(500, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    with on_device(CPU), torch.no_grad():
        router = load(tmp_path, dtype=dtype).decoder.layers[1].mlp.router
        weights, taken = router(rows[:, None])
        _, expected, chosen = stock.model.layers[1].mlp.gate(rows)
    assert taken.sum(1).eq(8).all() and torch.equal(taken.nonzero()[:, 1].view(500, 8), chosen.sort(1).values)
    assert torch.equal(weights.gather(1, chosen), expected) and weights.dtype == dtype
    assert (weights[~taken] == 0).all()


@pytest.mark.usefixtures("on_cpu")
def test_weights_that_are_not_normalized(tmp_path: Path) -> None:
    stock = save_tiny(tmp_path, FAMILY, norm_topk_prob=False)
    pairs = make_pairs(SIZES)
    torch.testing.assert_close(scores(load(tmp_path), pairs).double(), stock_logps(stock, pairs), rtol=2e-5, atol=0)


def test_sharing_a_prompt_changes_nothing(step: Callable[..., Any]) -> None:
    everyone = tuple(range(len(SIZES)))
    shared, separate = (
        step("dpo", plan=StepPlan(((MicroBatch(everyone, (share,) * len(SIZES)),),))) for share in (True, False)
    )
    np.testing.assert_allclose(shared[1].values, separate[1].values, rtol=1e-5, atol=2e-6)
    assert shared[1].grad_norm == pytest.approx(separate[1].grad_norm, rel=1e-5)
    assert_near(gradients(shared[0]), gradients(separate[0]), tolerance=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 (only 1) is not supported"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers [1] (only none) is not supported"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_config(FAMILY, **options).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        read_hf_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: {message}"


def test_flops_count_the_experts_that_a_token_takes() -> None:
    shape = model_shape(tiny_config(FAMILY), head="lm")
    attention = 48 * (2 * 64 + 2 * 32)
    assert shape.layer_parameters == attention + 48 * 4 + 2 * 3 * 48 * 24


# Steps against plain torch, with and without the balancing loss


def plain_step(loss: str, plan: StepPlan, coefficient: float) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """(losses of the pairs, balancing loss, gradients) of the stock model, one sequence after the other."""
    stock = tiny_model(tiny_config(FAMILY), head=HEADS[loss])
    pairs, losses, balance = make_pairs(SIZES), {}, torch.zeros(())
    for micro in plan.ranks[0]:
        logits = []  # of every router, [layers, tokens, experts]
        for i in micro.groups:
            values = [sequence_score(stock, pairs[i], side, loss, logits) for side in ("chosen", "rejected")]
            h = values[0] - values[1]
            losses[i] = torch.log1p(torch.exp(-(0.1 * h if loss == "dpo" else h)))
        for layer in zip(*logits, strict=True):
            probs = torch.cat(layer).softmax(-1)
            share = torch.nn.functional.one_hot(probs.topk(2).indices, 4).sum((0, 1)) / (2 * len(probs))
            balance = balance + len(micro.groups) / len(pairs) * 4 * (share * probs.mean(0)).sum() / len(stock.model.layers)
    total = torch.stack([losses[i] for i in range(len(pairs))]).mean() + coefficient * balance * len(stock.model.layers)
    total.backward()
    grads = {}
    for name, parameter in stock.named_parameters():
        if ".experts." not in name:
            grads[name] = parameter.grad
            continue
        for expert, grad in enumerate(parameter.grad):  # transformers keeps all experts in one tensor
            parts = {"gate_proj": grad[:24], "up_proj": grad[24:]} if "gate_up" in name else {"down_proj": grad}
            base = name.rsplit(".", 1)[0]
            grads |= {f"{base}.{expert}.{part}.weight": value for part, value in parts.items()}
    return [float(losses[i].detach()) for i in range(len(pairs))], float(balance.detach()), grads


def sequence_score(stock: Any, pair: TokenPair, side: str, loss: str, logits: list[Any]) -> torch.Tensor:
    answer = getattr(pair, side)
    ids = torch.tensor(np.concatenate((pair.prompt, answer)), dtype=torch.int64)
    result = stock.model(ids[None], output_router_logits=True)
    logits.append(result.router_logits)
    hidden = result.last_hidden_state[0]
    if loss == "rm":
        score: torch.Tensor = stock.score(hidden[-1])[0]
        return score
    logprobs = stock.lm_head(hidden[:-1]).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return logprobs[len(pair.prompt) - 1 :].sum()


@pytest.mark.parametrize("coefficient", [0.0, COEFFICIENT])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_equals_plain_torch(step: Callable[..., Any], loss: str, coefficient: float) -> None:
    """The balancing loss belongs to the gradients and to a metric of its own, never to the pairs' losses."""
    plan = plan_step(lengths_of(make_pairs(SIZES)), max_tokens=60, share_prompt=False)
    assert len({len(micro.groups) for micro in plan.ranks[0]}) > 1
    losses, balance, grads = plain_step(loss, plan, coefficient)
    engine, result = step(loss, plan=plan, moe_aux_loss_coeff=coefficient)
    np.testing.assert_allclose(result.values[:, 0], losses, rtol=2e-5)
    assert_near(gradients(engine), grads, tolerance=1e-5)
    if coefficient:
        assert result.moe_aux_loss == pytest.approx(balance, rel=1e-6) and balance > 1
    else:
        assert result.moe_aux_loss is None


def test_even_routing_gives_one(step: Callable[..., Any]) -> None:
    """With equal probabilities of all experts."""
    engine, _ = step("dpo", moe_aux_loss_coeff=COEFFICIENT)
    with torch.no_grad():
        for layer in engine.chunks[0].decoder.layers:
            layer.mlp.router.weight.zero_()
    references = np.zeros((len(SIZES), 2))
    assert engine.train_step(make_batch(make_pairs(SIZES), references=references)).moe_aux_loss == pytest.approx(1, rel=1e-6)


def test_padding_and_empty_micro_batches_do_not_count(step: Callable[..., Any]) -> None:
    plan = plan_step(lengths_of(make_pairs(SIZES)), max_tokens=60)
    engine, expected = step("dpo", plan=plan, moe_aux_loss_coeff=COEFFICIENT)
    first, *rest = plan.ranks[0]
    other, result = step("dpo", plan=StepPlan(((MicroBatch(), first, MicroBatch(), *rest),)), moe_aux_loss_coeff=COEFFICIENT)
    assert (result.moe_aux_loss, result.grad_norm) == (expected.moe_aux_loss, expected.grad_norm)
    assert_same(gradients(other), gradients(engine))


def test_recompute_counts_the_balancing_loss_once(step: Callable[..., Any]) -> None:
    engine, expected = step("dpo", moe_aux_loss_coeff=COEFFICIENT)
    for options in (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    ):
        other, result = step("dpo", moe_aux_loss_coeff=COEFFICIENT, **options)
        assert (result.moe_aux_loss, result.grad_norm) == (expected.moe_aux_loss, expected.grad_norm)
        assert_same(parameters(other), parameters(engine))


def test_the_distributed_optimizer_gives_the_plain_ones_numbers(step: Callable[..., Any]) -> None:
    (engine, expected), (other, result) = (step("dpo", distributed=distributed) for distributed in (False, True))
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    assert_near(parameters(other), parameters(engine), tolerance=1e-6)


def test_evaluation_has_no_balancing_loss(step: Callable[..., Any]) -> None:
    engine, _ = step("rm", moe_aux_loss_coeff=COEFFICIENT)
    engine.evaluate(make_batch(make_pairs(SIZES)))
    assert [layer.mlp.router.balance for layer in engine.chunks[0].decoder.layers] == [0.0, 0.0]
