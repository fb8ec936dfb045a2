"""Engines over tiny models, driven by hand, and what tests read out of them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.backend.checkpoint.loading import find_checkpoint, save_checkpoint
from relax.backend.checkpoint.state import training_state
from relax.backend.device import on_device
from relax.backend.engine import Batch, Engine
from relax.backend.model.families import read_hf_config
from relax.backend.optimizer import OptimizerOptions
from relax.backend.parallel import ParallelConfig
from relax.backend.weights.hugging_face import hf_tensors, load_hf_weights
from relax.objectives import DPO, OBJECTIVES, Objective
from relax.packing import StepPlan, plan_step
from relax.training.weight_source import resume
from tests.models import VOCABULARY, TokenPair

CPU = torch.device("cpu")
OPTIONS = OptimizerOptions(
    lr=1e-3,
    min_lr=0.0,
    decay_style="constant",
    warmup_steps=0,
    total_steps=100,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    clip_grad=1e9,  # gives the norm and leaves the gradients as they are
    distributed=False,
    overlap=False,
)


def make_engine(
    directory: Path,
    objective: str | Objective,
    *,
    dtype: torch.dtype = torch.float32,
    options: OptimizerOptions | None = OPTIONS,
    seed: int = 0,
    **overrides: Any,
) -> Engine:
    """An engine with the directory's weights, ready to train; needs the `one_process` fixture."""
    config = read_hf_config(directory)
    objective = OBJECTIVES[objective]() if isinstance(objective, str) else objective
    engine = Engine(config, objective=objective, device=CPU, dtype=dtype, parallel=ParallelConfig(), **overrides)
    with on_device(CPU):
        load_hf_weights(engine.chunks, directory, config, seed=seed)
    if options:
        engine.prepare_training(options)
    return engine


def make_pairs(sizes: Iterable[tuple[int, int, int]], *, seed: int = 0, below: int = VOCABULARY) -> list[TokenPair]:
    """Random pairs with the given numbers of prompt, chosen and rejected tokens, ids in [0, below)."""
    rng = np.random.default_rng(seed)
    return [TokenPair(*(rng.integers(0, below, n).astype(np.int32) for n in size)) for size in sizes]


def lengths_of(pairs: Sequence[TokenPair]) -> np.ndarray:
    return np.array([[len(p.prompt), len(p.chosen), len(p.rejected)] for p in pairs], dtype=np.int64).reshape(-1, 3)


def make_batch(
    pairs: Sequence[TokenPair],
    *,
    plan: StepPlan | None = None,
    max_tokens: int = 80,
    margins: np.ndarray | None = None,
    **values: Any,
) -> Batch:
    lengths = lengths_of(pairs)
    plan = plan or plan_step(lengths, max_tokens=max_tokens)
    return Batch(groups=pairs, plan=plan, lengths=lengths, columns={} if margins is None else {"margin": margins}, **values)


def with_reference(engine: Engine, batch: Batch) -> Batch:
    """The batch with the engine's present scores as its reference, rounded as the table keeps them."""
    scores = engine.score(batch).astype(np.float32)
    return dataclasses.replace(batch, references=scores)


STANDING = dataclasses.replace(OPTIONS, lr=0.0, weight_decay=0.0)  # a step leaves the weights as they are


def start_batch(engine: Engine, *, count: int = 61, max_tokens: int = 8192, share_prompt: bool = True, seed: int = 0) -> Batch:
    """By default as many pairs, in as large micro-batches, as choose other matrix products than a few pairs do."""
    sizes = np.random.default_rng(seed).integers(1, 60, (count, 3))
    pairs = make_pairs(sizes.tolist(), seed=seed, below=engine.hf_config.vocab_size)
    plan = plan_step(
        sizes,
        dp_size=engine.dp_size,
        max_tokens=max_tokens,
        share_prompt=share_prompt,
        microbatch_multiple=engine.microbatch_multiple,
    )
    return make_batch(pairs, plan=plan)


MOVES = ("reward_chosen", "reward_rejected", "reward_margin")
RATES = ("strict_accuracy", "tie_rate", "tie_aware_accuracy")
UNMOVED = [(math.log(2), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5)]  # `values_at_start` of a policy that is its reference


def values_at_start(engine: Engine, batch: Batch) -> list[tuple[float, ...]]:
    """What pairs have as the engine evaluates them and as it trains on them, each kind once: loss, log-probs of chosen and
    rejected minus the reference's, MOVES, RATES."""
    found: set[tuple[float, ...]] = set()
    for values in (engine.evaluate(batch), engine.train_step(batch).values):
        table = {metric.name: values[:, i] for i, metric in enumerate(engine.objective.metrics)}
        differences = [table[f"logps_{side}"] - table[f"ref_logps_{side}"] for side in ("chosen", "rejected")]
        found |= set(zip(table["loss"], *differences, *(table[name] for name in MOVES + RATES), strict=True))
    return sorted(tuple(float(value) for value in row) for row in found)


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the weights, by Hugging Face name."""
    with on_device(CPU):
        return {name: tensor.clone() for name, tensor in hf_tensors(engine.chunks, engine.hf_config) if tensor is not None}


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the last step's gradients, by Hugging Face name; fp32 engines only."""
    held = [(p, p.data) for chunk in engine.chunks for p in chunk.parameters()]
    for parameter, _ in held:
        parameter.data = parameter.main_grad
    try:
        return parameters(engine)
    finally:
        for parameter, data in held:
            parameter.data = data


def optimizer_tensors(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    """Copies of the master weights and of everything that AdamW keeps beside them, flat, by the parameter's name: of one kind
    of optimizer as of the other. One rank only."""
    names = {p: f"{i} {name}" for i, chunk in enumerate(engine.chunks) for name, p in chunk.named_parameters()}
    tensors = {}
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        groups = [group["params"] for group in part.optimizer.param_groups]
        if hasattr(part, "model_param_group_index_map"):  # distributed
            masters = {p: groups[g][i] for p, (g, i) in part.model_param_group_index_map.items()}
        else:
            masters = dict(zip(chain(*getattr(part, "float16_groups", groups)), chain(*groups), strict=True))
        for p, master in masters.items():
            state = {"main": master.detach(), **part.optimizer.state[master]}
            tensors |= {(names[p], kind): torch.as_tensor(value).flatten().clone() for kind, value in state.items()}
    return tensors


def assert_same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    """Equal names and equal bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_near(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor], *, tolerance: float) -> None:
    """Equal names; every tensor within `tolerance` of its norm, and of a thousandth of the largest norm."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(tensor.norm()) for tensor in expected.values())
    errors = {n: float((found[n] - t).norm()) / max(float(t.norm()), floor) for n, t in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def column(engine: Engine, values: np.ndarray, name: str) -> np.ndarray:
    """One metric of every pair."""
    return values[:, [metric.name for metric in engine.objective.metrics].index(name)]


# Each of its terms depends on the whole global batch, two of them on the steps before.
COUPLED = DPO(loss="aot,aot_unpaired,bco,beta_dpo", beta=0.1, shift="running")
SIZES = [(9, 5, 8), (4, 11, 3), (12, 2, 6), (7, 7, 1), (3, 4, 9), (6, 3, 5), (8, 6, 2), (2, 9, 4)]
BATCHES = ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (5,), (6, 7))  # pairs of a step: an odd number, fewer than ranks, a last few
SAVED = 2  # the step after which runs save and resume


def train_and_resume(engine: Engine, *, distributed: bool = False, save: Path | None = None, load: Path | None = None) -> Any:
    """An optimizer step on each of BATCHES and an evaluation, against the engine's start as reference where it needs one.

    save: where to leave a checkpoint after step SAVED; load: where to take it from, in place of the steps before. The result,
    per-pair values of every step and of the evaluation, gradient norms, weights by name on rank 0.
    """
    pairs = make_pairs(SIZES, below=engine.hf_config.vocab_size)
    batches = []
    for indices in BATCHES:
        chosen = [pairs[i] for i in indices]
        plan = plan_step(
            lengths_of(chosen), dp_size=engine.dp_size, max_tokens=60, microbatch_multiple=engine.microbatch_multiple
        )
        batch = make_batch(chosen, plan=plan)
        batches.append(with_reference(engine, batch) if engine.objective.needs_reference else batch)
    engine.prepare_training(dataclasses.replace(OPTIONS, distributed=distributed, overlap=distributed, clip_grad=1.0))
    if load:
        resume_run(engine, load, step=SAVED)
    results = []
    for step in range(SAVED if load else 0, len(BATCHES)):
        results.append(engine.train_step(batches[step]))
        if save and step + 1 == SAVED:
            save_run(engine, save, step=SAVED)
    return {
        "values": [result.values.tolist() for result in results] + [engine.evaluate(batches[-2]).tolist()],
        "norms": [result.grad_norm for result in results],
        "weights": parameters(engine),
    }


def coupled_steps(engine: Engine) -> list[Any]:
    """Two steps of a coupled objective on pairs of unequal size: each pair's values, the norm, and what is remembered."""
    pairs = make_pairs(SIZES, below=engine.hf_config.vocab_size)
    plan = plan_step(lengths_of(pairs), dp_size=engine.dp_size, max_tokens=60, microbatch_multiple=engine.microbatch_multiple)
    references = np.random.default_rng(0).normal(-25, 10, (len(pairs), 2)).astype(np.float32)
    batch = make_batch(pairs, plan=plan, references=references)
    engine.prepare_training(OPTIONS)
    results = [engine.train_step(batch) for _ in range(2)]
    return [*((result.values.tolist(), result.grad_norm) for result in results), dict(engine.objective_state)]


def save_run(engine: Engine, directory: Path, *, step: int) -> None:
    """What the engine is after `step`, to resume from."""
    state = training_state(engine, step=step, optimizer=True, rng=True, loading=False)
    run = {"head": engine.objective.head, "arguments": {"use_distributed_optimizer": engine.distributed_optimizer}}
    save_checkpoint(directory, step=step, state=state, files={"relax_run.json": run})


def resume_run(engine: Engine, directory: Path, *, step: int) -> None:
    """Go on from what `save_run` saved, whose schedule is this one."""
    info = find_checkpoint(directory, step=step, flag="--load")
    assert info is not None
    resume(engine, info, optimizer=True, rng=True, say=_unexpected)


def _unexpected(text: str) -> None:
    raise AssertionError(text)


def save_by_both(build: Callable[[], Engine], directory: Path, *, distributed: bool) -> None:
    """A step trained by an optimizer that is distributed or not, saved by it in directory/own; and in directory/other by one
    of the other kind, which resumed that."""
    for place, kind in (("own", distributed), ("other", not distributed)):
        engine = build()
        engine.prepare_training(dataclasses.replace(OPTIONS, distributed=kind, overlap=kind))
        if place == "own":
            references = None if engine.objective.head == "scalar" else np.full((9, 2), -30.0)
            engine.train_step(dataclasses.replace(start_batch(engine, count=9), references=references))
        else:
            resume_run(engine, directory / "own", step=1)
        save_run(engine, directory / place, step=1)


def assert_saved_alike(build: Callable[[], Engine], directory: Path) -> None:
    """What `save_by_both` saved holds the same bits in both places, as one process with either kind of optimizer reads them."""
    found = []
    for kind in (False, True):
        for place in ("own", "other"):
            engine = build()
            engine.prepare_training(dataclasses.replace(OPTIONS, distributed=kind))
            resume_run(engine, directory / place, step=1)
            found.append({**parameters(engine), **{str(key): value for key, value in optimizer_tensors(engine).items()}})
    for other in found[1:]:
        assert_same(other, found[0])
    moments = [value for key, value in found[0].items() if "exp_avg" in key]
    assert len(moments) > 10 and all(value.any() for value in moments)
