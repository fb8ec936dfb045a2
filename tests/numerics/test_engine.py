"""Training steps: exact values at step 0, independence of packing and order, and the same numbers as plain torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from relax.backend.engine import Engine
from relax.objectives import DPO, RewardModel
from relax.objectives.base import Metric, Objective, Scores
from relax.packing import MicroBatch, StepPlan, plan_step
from tests.engines import (
    OPTIONS,
    assert_near,
    assert_same,
    column,
    gradients,
    lengths_of,
    make_batch,
    make_engine,
    make_pairs,
    optimizer_tensors,
    parameters,
    with_reference,
)
from tests.models import TokenPair, save_tiny, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_process")

LN2 = 0.6931471805599453
SIZES = [(7, 5, 9), (12, 1, 4), (1, 6, 6), (20, 3, 1), (4, 8, 2), (16, 7, 7), (9, 2, 11)]
LOSSES = ("dpo", "rm")
FAMILY = {"dpo": "qwen3", "rm": "llama"}
TIED = {"dpo": True, "rm": False}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied Qwen3 policy and a Llama reward model."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dpo", FAMILY["dpo"], tie_word_embeddings=True)
    save_tiny(root / "rm", FAMILY["rm"], head="scalar")
    return {loss: root / loss for loss in LOSSES}


@pytest.fixture(scope="module")
def references() -> np.ndarray:
    """Reference log-probs that no policy here has, so that rewards are not zero."""
    return (np.random.default_rng(3).normal(-30, 4, (len(SIZES), 2))).astype(np.float32)


@pytest.fixture
def step(directories: dict[str, Path], references: np.ndarray) -> Callable[..., Any]:
    """One step of a fresh engine over a plan of the pairs: (engine, its result)."""

    def run(loss: str, *, plan: StepPlan | None = None, order: Any = None, **options: Any) -> tuple[Engine, Any]:
        order = range(len(SIZES)) if order is None else order
        pairs = make_pairs(SIZES)
        engine = make_engine(directories[loss], loss, options=replace(OPTIONS, **options))
        batch = make_batch(
            [pairs[i] for i in order],
            plan=plan,
            references=references[list(order)] if loss == "dpo" else None,
            margins=np.linspace(-1, 1, len(SIZES))[list(order)] if loss == "rm" else None,
        )
        return engine, engine.train_step(batch)

    return run


# Step 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_reward_head_gives_ln_2_exactly(directories: dict[str, Path], dtype: torch.dtype) -> None:
    engine = make_engine(directories["rm"], "rm", dtype=dtype, options=None)
    torch.nn.init.zeros_(engine.chunks[0].score.weight)
    values = engine.evaluate(make_batch(make_pairs(SIZES)))
    assert (column(engine, values, "loss") == LN2).all()
    assert (column(engine, values, "score_chosen") == 0).all()
    assert (column(engine, values, "tie_rate") == 1).all()


@dataclass(frozen=True)
class Watched(Objective):
    """A loss that keeps the gradients of its scores, and may move them first."""

    inner: Any
    shift: float = 0.0
    gradients: list[torch.Tensor] = field(default_factory=list)
    needs_reference: ClassVar[bool] = True

    @property
    def head(self) -> Any:
        return self.inner.head

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self.inner.metrics

    def __call__(self, scores: Scores) -> Any:
        values = scores.values + self.shift
        if values.requires_grad:
            values.retain_grad()
            self.gradients.append(values)
        return self.inner(replace(scores, values=values))


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_score_gradients_at_step_zero_are_half_beta(directories: dict[str, Path], beta: float) -> None:
    loss = Watched(DPO(beta=beta))
    engine = make_engine(directories["dpo"], loss)
    engine.train_step(with_reference(engine, make_batch(make_pairs(SIZES))))
    grads = [values.grad.view(-1, 2) for values in loss.gradients]
    assert torch.cat(grads).tolist() == [[-beta / 2, beta / 2]] * len(SIZES)  # the engine divides by the pairs at the end


def test_score_gradients_of_a_zero_reward_head_are_one_half(directories: dict[str, Path]) -> None:
    loss = Watched(RewardModel())
    engine = make_engine(directories["rm"], loss, options=None)
    torch.nn.init.zeros_(engine.chunks[0].score.weight)
    engine.prepare_training(OPTIONS)
    engine.train_step(make_batch(make_pairs(SIZES)))
    grads = [values.grad.view(-1, 2) for values in loss.gradients]
    assert torch.cat(grads).tolist() == [[-0.5, 0.5]] * len(SIZES)


# What a step does not depend on


def plans() -> dict[str, StepPlan]:
    """Other ways to run the same pairs than `make_batch`'s own."""
    lengths, everyone = lengths_of(make_pairs(SIZES)), tuple(range(len(SIZES)))
    one = MicroBatch(everyone, (True, False) * 3 + (True,))
    return {
        "one micro-batch": StepPlan(((one,),)),
        "a micro-batch per pair": StepPlan((tuple(MicroBatch((i,), (False,)) for i in everyone),)),
        "nothing shared": plan_step(lengths, max_tokens=60, share_prompt=False),
        "a small budget": plan_step(lengths, max_tokens=40),
    }


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_does_not_depend_on_the_packing(step: Callable[..., Any], loss: str) -> None:
    engine, expected = step(loss)
    grads, weights = gradients(engine), parameters(engine)
    assert all(grad.any() for grad in grads.values())
    for name, plan in plans().items():
        other, result = step(loss, plan=plan)
        np.testing.assert_allclose(result.values, expected.values, rtol=1e-5, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(result.values[:, 0].mean(), expected.values[:, 0].mean(), rtol=1e-6, err_msg=name)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert_near(gradients(other), grads, tolerance=1e-5)
        assert_near(parameters(other), weights, tolerance=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_does_not_depend_on_the_order_of_its_pairs(step: Callable[..., Any], loss: str) -> None:
    engine, expected = step(loss)
    order = [4, 2, 6, 0, 1, 5, 3]
    other, result = step(loss, order=order)
    np.testing.assert_allclose(result.values, expected.values[order], rtol=1e-5, atol=2e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert_near(gradients(other), gradients(engine), tolerance=1e-5)
    assert_near(parameters(other), parameters(engine), tolerance=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_empty_micro_batches_change_nothing(step: Callable[..., Any], loss: str) -> None:
    """Bit for bit, before, between and after the others."""
    plan = plan_step(lengths_of(make_pairs(SIZES)), max_tokens=80)
    engine, expected = step(loss, plan=plan)
    first, *rest = plan.ranks[0]
    other, result = step(loss, plan=StepPlan(((MicroBatch(), first, MicroBatch(), *rest, MicroBatch()),)))
    assert (result.values == expected.values).all() and result.grad_norm == expected.grad_norm
    assert_same(gradients(other), gradients(engine))
    assert_same(parameters(other), parameters(engine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_two_engines_of_one_seed_are_identical(directories: dict[str, Path], loss: str, dtype: torch.dtype) -> None:
    """Bit for bit over three steps; the reward head is drawn from the seed, from a model that has none."""
    base = directories["dpo"]
    runs = []
    for _ in range(2):
        torch.manual_seed(torch.seed())  # what was drawn before does not count
        engine = make_engine(base, loss, dtype=dtype, seed=7)
        batch = make_batch(make_pairs(SIZES), references=np.zeros((len(SIZES), 2)) if loss == "dpo" else None)
        results = [engine.train_step(batch) for _ in range(3)]
        runs.append((parameters(engine), optimizer_tensors(engine), results))
    (weights, state, results), (other_weights, other_state, other_results) = runs
    assert_same(other_weights, weights)
    assert_same(other_state, state)
    for result, other in zip(results, other_results, strict=True):
        assert (result.values == other.values).all() and result.grad_norm == other.grad_norm
    assert results[2].values[:, 0].mean() < results[0].values[:, 0].mean()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_distributed_optimizer_gives_the_plain_ones_numbers(step: Callable[..., Any], loss: str) -> None:
    runs = []
    for distributed, overlap in ((False, False), (True, False), (True, True)):
        engine, first = step(loss, distributed=distributed, overlap=overlap, clip_grad=0.5)
        pairs = make_pairs(SIZES)
        references = np.zeros((len(SIZES), 2)) if loss == "dpo" else None
        results = [first, *(engine.train_step(make_batch(pairs, references=references)) for _ in range(2))]
        runs.append((parameters(engine), results))
    weights, results = runs[0]
    assert results[0].grad_norm > 0.5  # clipping takes part
    for other_weights, others in runs[1:]:
        for result, other in zip(results, others, strict=True):
            np.testing.assert_allclose(other.values, result.values, rtol=1e-5, atol=2e-6)
            assert other.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
        assert_near(other_weights, weights, tolerance=1e-5)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_keeps_nothing_of_the_gradients_before_it(
    directories: dict[str, Path], references: np.ndarray, loss: str, distributed: bool
) -> None:
    found = []
    for seeds in ([1, 2], [2]):
        options = replace(OPTIONS, lr=0.0, weight_decay=0.0, distributed=distributed)
        engine = make_engine(directories[loss], loss, options=options)
        for seed in seeds:
            batch = make_batch(make_pairs(SIZES, seed=seed), references=references if loss == "dpo" else None)
            result = engine.train_step(batch)
        found.append((result.values, result.grad_norm, gradients(engine)))
    (values, norm, grads), (expected, expected_norm, expected_grads) = found
    assert (values == expected).all() and norm == expected_norm
    assert_same(grads, expected_grads)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_frozen_output_layer_changes_nothing_for_the_others(
    tmp_path: Path, references: np.ndarray, distributed: bool
) -> None:
    save_tiny(tmp_path, "qwen3")
    found = []
    for frozen in (True, False):
        engine = make_engine(tmp_path, "dpo", options=None)
        output = engine.chunks[0].output_layer.weight.requires_grad_(not frozen)
        engine.prepare_training(replace(OPTIONS, distributed=distributed))
        before = output.detach().clone()
        values = engine.train_step(make_batch(make_pairs(SIZES), references=references)).values
        assert torch.equal(output, before) == frozen and hasattr(output, "main_grad") != frozen
        named = engine.chunks[0].named_parameters()
        grads = {name: p.main_grad.clone() for name, p in named if p is not output}
        found.append((values, grads, parameters(engine)))
    (values, grads, weights), (expected, expected_grads, expected_weights) = found
    assert (values == expected).all() and len(grads) > 10
    assert_same(grads, expected_grads)
    assert_same(*({n: t for n, t in each.items() if n != "lm_head.weight"} for each in (weights, expected_weights)))


# Symmetries


def swapped(pairs: list[TokenPair]) -> list[TokenPair]:
    return [TokenPair(prompt=p.prompt, chosen=p.rejected, rejected=p.chosen) for p in pairs]


@pytest.mark.parametrize("loss", LOSSES)
def test_swapping_the_answers_flips_the_margin(directories: dict[str, Path], references: np.ndarray, loss: str) -> None:
    engine = make_engine(directories[loss], loss, options=None)
    pairs = make_pairs(SIZES)
    tables = (references, references[:, ::-1]) if loss == "dpo" else (None, None)
    values, flipped = (
        engine.evaluate(make_batch(p, references=table)) for p, table in zip((pairs, swapped(pairs)), tables, strict=True)
    )
    kind = {"dpo": "reward", "rm": "score"}[loss]
    margin = column(engine, values, f"{kind}_margin")
    assert (np.abs(margin) > 1e-3).all()
    np.testing.assert_allclose(column(engine, flipped, f"{kind}_margin"), -margin, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        column(engine, flipped, f"{kind}_chosen"), column(engine, values, f"{kind}_rejected"), rtol=1e-4, atol=1e-5
    )
    # -log sigmoid(m) and -log sigmoid(-m) differ by m.
    np.testing.assert_allclose(column(engine, flipped, "loss") - column(engine, values, "loss"), margin, rtol=1e-4, atol=1e-5)
    assert (column(engine, flipped, "strict_accuracy") == 1 - column(engine, values, "strict_accuracy")).all()


def test_a_constant_added_to_both_rewards_changes_nothing(directories: dict[str, Path]) -> None:
    batch = make_batch(make_pairs(SIZES))
    engines, results = zip(
        *((engine, engine.train_step(batch)) for engine in (
            make_engine(directories["rm"], Watched(RewardModel(), shift=shift)) for shift in (0.0, 3.0)
        )),
        strict=True,
    )  # fmt: skip
    plain, shifted = (column(engines[0], result.values, "score_chosen") for result in results)
    np.testing.assert_allclose(shifted, plain + 3, rtol=1e-12)
    for name in ("loss", "score_margin", "strict_accuracy"):
        found, expected = (column(engines[0], result.values, name) for result in (results[1], results[0]))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert_near(gradients(engines[1]), gradients(engines[0]), tolerance=1e-6)


def test_a_rows_margin_counts_against_its_score(directories: dict[str, Path]) -> None:
    engine = make_engine(directories["rm"], "rm", options=None)
    pairs, margins = make_pairs(SIZES), np.linspace(0, 2, len(SIZES))
    plain, moved = (engine.evaluate(make_batch(pairs, margins=m)) for m in (None, margins))
    margin = column(engine, plain, "score_margin")
    np.testing.assert_allclose(column(engine, moved, "loss"), np.log1p(np.exp(margins - margin)), rtol=1e-6)
    assert (column(engine, moved, "score_margin") == margin).all()


def test_the_reward_is_read_at_the_last_token_whatever_it_is(directories: dict[str, Path]) -> None:
    """Padding and end ids inside and at the end of an answer; a stock model without a padding id pools its last row."""
    engine = make_engine(directories["rm"], "rm", options=None)
    end, pad = 256, 257
    prompt = np.array([5, 6, 7])
    pairs = [
        TokenPair(prompt, np.array([8, end, 9, pad]), np.array([8, end, 9, pad, pad])),
        TokenPair(prompt, np.array([pad, end]), np.array([pad])),
        TokenPair(prompt, np.array([0, 0, 0]), np.array([0])),
    ]
    scores = engine.score(make_batch(pairs, plan=plan_step(lengths_of(pairs), max_tokens=1000, share_prompt=True)))
    stock = tiny_model(tiny_config("llama"), head="scalar")
    with torch.no_grad():
        for i, pair in enumerate(pairs):
            for side, answer in enumerate((pair.chosen, pair.rejected)):
                ids = torch.tensor(np.concatenate((pair.prompt, answer)))
                hidden = stock.model(ids[None]).last_hidden_state[0, -1]
                assert scores[i, side] == pytest.approx(float(hidden @ stock.score.weight[0]), abs=1e-5)


# Against plain torch and transformers


def reference_step(
    loss: str, references: np.ndarray | None, margins: np.ndarray | None, *, clip: float
) -> tuple[Any, list[float], float, dict[str, torch.Tensor]]:
    """One step as a textbook has it: pair after pair on the stock model; (model, losses, gradient norm, gradients)."""
    head = "lm" if loss == "dpo" else "scalar"
    stock = tiny_model(tiny_config(FAMILY[loss], tie_word_embeddings=TIED[loss]), head=head)
    losses = []
    for i, pair in enumerate(make_pairs(SIZES)):
        scores = []
        for answer in (pair.chosen, pair.rejected):
            ids = torch.tensor(np.concatenate((pair.prompt, answer)), dtype=torch.int64)
            if head == "lm":
                logprobs = stock(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                scores.append(logprobs[len(pair.prompt) - 1 :].sum())
            else:
                scores.append(stock.score(stock.model(ids[None]).last_hidden_state[0, -1])[0])
        h = scores[0] - scores[1]
        if references is not None:
            h = 0.1 * (h - float(references[i, 0]) + float(references[i, 1]))
        if margins is not None:
            h = h - float(margins[i])
        losses.append(torch.log1p(torch.exp(-h)))
    (sum(losses) / len(losses)).backward()
    grads = {name: p.grad.clone() for name, p in stock.named_parameters()}
    norm = float(torch.nn.utils.clip_grad_norm_(stock.parameters(), clip))
    decayed, plain = ([p for p in stock.parameters() if (p.dim() > 1) is big] for big in (True, False))
    torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIONS.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=OPTIONS.lr,
        betas=(OPTIONS.beta1, OPTIONS.beta2),
        eps=OPTIONS.eps,
    ).step()
    return stock, [float(x.detach()) for x in losses], norm, grads


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_equals_plain_torch(step: Callable[..., Any], references: np.ndarray, loss: str) -> None:
    margins = np.linspace(-1, 1, len(SIZES)) if loss == "rm" else None
    stock, losses, norm, grads = reference_step(loss, references if loss == "dpo" else None, margins, clip=1e9)
    engine, result = step(loss)
    np.testing.assert_allclose(result.values[:, 0], losses, rtol=2e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert_near(gradients(engine), grads, tolerance=1e-5)
    weights = {name: p.detach() for name, p in stock.named_parameters()}
    assert_near(parameters(engine), weights, tolerance=1e-4)
    assert result.lr == OPTIONS.lr


def test_clipping_scales_the_gradient_to_its_largest_norm(step: Callable[..., Any]) -> None:
    free, small = step("rm"), step("rm", clip_grad=0.1)
    assert small[1].grad_norm == free[1].grad_norm > 0.1  # the norm before clipping
    scale = 0.1 / (free[1].grad_norm + 1e-6)
    assert_near(gradients(small[0]), {n: g * scale for n, g in gradients(free[0]).items()}, tolerance=1e-6)


@pytest.mark.parametrize("distributed", [False, True])
def test_clipping_off_still_measures_the_norm(step: Callable[..., Any], distributed: bool) -> None:
    free, off = (step("rm", clip_grad=clip, distributed=distributed) for clip in (OPTIONS.clip_grad, 0.0))
    assert off[1].grad_norm == free[1].grad_norm
    assert_same(parameters(off[0]), parameters(free[0]))


def test_weight_decay_spares_vectors(directories: dict[str, Path]) -> None:
    """With no gradient at all, only matrices shrink, by lr x decay."""
    engine = make_engine(directories["dpo"], "dpo", options=replace(OPTIONS, weight_decay=0.5, lr=0.01))
    before = parameters(engine)
    engine.train_step(make_batch([], plan=StepPlan(((MicroBatch(),),)), references=np.zeros((0, 2))))
    for name, tensor in parameters(engine).items():
        expected = before[name] * (1 - 0.005) if tensor.dim() > 1 else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


# The schedule


@pytest.mark.parametrize(
    ("style", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 2, [0, 0.5, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.85, 0.7, 0.55, 0.4, 0.25]),
        ("linear", 2, [0, 0.5, 1, 0.775, 0.55, 0.325]),
        ("cosine", 0, [0.1 + 0.45 * (1 + math.cos(math.pi * s / 6)) for s in range(6)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    directories: dict[str, Path], style: str, warmup: int, expected: list[float]
) -> None:
    options = replace(OPTIONS, lr=1e-3, min_lr=1e-4, decay_style=style, warmup_steps=warmup, total_steps=6)
    engine = make_engine(directories["rm"], "rm", options=options)
    batch = make_batch(make_pairs([(2, 1, 1)]))
    np.testing.assert_allclose([engine.train_step(batch).lr for _ in range(6)], np.array(expected) * 1e-3, rtol=1e-9)


# Scores and evaluation


@pytest.mark.parametrize("loss", LOSSES)
def test_scoring_and_evaluation_leave_the_model_alone(directories: dict[str, Path], references: np.ndarray, loss: str) -> None:
    engine = make_engine(directories[loss], loss)
    before, state = parameters(engine), optimizer_tensors(engine)
    batch = make_batch(make_pairs(SIZES), references=references if loss == "dpo" else None)
    scores, values = engine.score(batch), engine.evaluate(batch)
    kind = {"dpo": "logps", "rm": "score"}[loss]
    assert (scores == np.stack([column(engine, values, f"{kind}_{side}") for side in ("chosen", "rejected")], 1)).all()
    assert_same(parameters(engine), before)
    assert_same(optimizer_tensors(engine), state)
    assert (engine.train_step(batch).values == values).all()  # a forward pass with gradients is the same forward pass
