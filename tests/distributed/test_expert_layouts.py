"""Two and four processes give what one gives, with experts and without: hashes, exports, scores, steps, resumed steps.

The test runs this file, which forks the ranks once it has imported everything; each rank saves what it found. A
mixture-of-experts model trains with its balancing loss, whose part of a step depends on the micro-batches, so one process takes
the same ones.
"""

import dataclasses
import multiprocessing
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from relax.backend import parallel
from relax.backend.device import on_device
from relax.backend.engine import Batch, Engine
from relax.backend.model.families import read_hf_config
from relax.backend.parallel import ParallelConfig
from relax.backend.weights.export import export_hf
from relax.backend.weights.hugging_face import load_hf_weights, weight_hashes
from relax.objectives import OBJECTIVES
from relax.packing import StepPlan, plan_step
from tests.engines import (
    OPTIONS,
    STANDING,
    UNMOVED,
    assert_near,
    assert_saved_alike,
    lengths_of,
    make_batch,
    make_pairs,
    parameters,
    resume_run,
    save_by_both,
    save_run,
    start_batch,
    values_at_start,
    with_reference,
)
from tests.models import save_tiny

pytestmark = pytest.mark.distributed
CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
MODELS: dict[str, dict[str, Any]] = {  # an odd vocabulary pads its last shard
    "experts": {"family": "qwen3_moe", "vocab_size": 271},
    "experts reward": {"family": "qwen3_moe", "head": "scalar"},
    "deep experts": {"family": "qwen3_moe", "num_hidden_layers": 4},
    "dense": {"family": "qwen3", "vocab_size": 271, "tie_word_embeddings": True},
    "dense reward": {"family": "llama", "head": "scalar"},
}
# (ranks, name) -> layout, whether the optimizer is distributed, models
LAYOUTS: dict[tuple[int, str], tuple[ParallelConfig, bool, tuple[str, ...]]] = {
    (2, "dp2"): (ParallelConfig(), True, ("experts",)),
    (2, "ep2"): (ParallelConfig(expert=2), False, ("experts", "experts reward")),
    (2, "ep2-distributed"): (ParallelConfig(expert=2), True, ("experts",)),
    (2, "tp2-sp"): (ParallelConfig(tensor=2, sequence=True), False, ("experts",)),
    (2, "tp2-sp-etp1"): (ParallelConfig(tensor=2, sequence=True, expert_tensor=1), True, ("experts",)),
    (2, "tp2-sp-ep2-etp1"): (ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1), False, ("experts",)),
    (2, "pp2"): (ParallelConfig(pipeline=2), True, ("experts reward",)),
    (2, "pp2-interleaved"): (ParallelConfig(pipeline=2, layers_per_virtual_stage=1), False, ("deep experts",)),
    (2, "cp2"): (ParallelConfig(context=2), False, ("experts reward",)),
    (2, "cp2-ep2"): (ParallelConfig(context=2, expert=2), True, ("experts",)),
    (4, "tp2-sp-dp2"): (ParallelConfig(tensor=2, sequence=True), True, ("experts", "dense reward")),
    (4, "pp2-tp2-sp"): (ParallelConfig(tensor=2, pipeline=2, sequence=True), False, ("experts reward", "dense")),
    (4, "pp2-ep2"): (ParallelConfig(pipeline=2, expert=2), True, ("experts",)),
    (4, "tp2-sp-ep2-etp2"): (ParallelConfig(tensor=2, sequence=True, expert=2), False, ("experts",)),
}
NUMBERS = ("values", "norms", "balance")
SIZES = ([(9, 5, 8), (4, 11, 3), (12, 2, 6), (7, 7, 1), (3, 4, 9)], [(6, 3, 5)])  # of two steps: five pairs, then one
Plans = tuple[StepPlan, ...] | None  # of both steps; None: the layout's own


def run(model: Path, layout: ParallelConfig, plans: Plans, *, distributed: bool, place: Path) -> dict[str, Any]:
    """Hashes, an export to `place`, a step, a checkpoint there, a step."""
    engine = build(model, layout)
    with on_device(CPU):
        found: dict[str, Any] = {"hashes": weight_hashes(engine.chunks, engine.hf_config)}
        export_hf(engine.chunks, engine.hf_config, source=model, output=place / "exported")
    first, second = batches_of(engine, plans)
    engine.prepare_training(options(distributed))
    steps = [engine.train_step(first)]
    save_run(engine, place / "saved", step=1)
    steps.append(engine.train_step(second))
    return {**found, **outcome(engine, steps)}


def resumed(model: Path, layout: ParallelConfig, plans: Plans, *, distributed: bool, place: Path) -> dict[str, Any]:
    """The second step, from the checkpoint in `place`."""
    engine = build(model, layout)
    _, second = batches_of(engine, plans)
    engine.prepare_training(options(distributed))
    resume_run(engine, place / "saved", step=1)
    return outcome(engine, [engine.train_step(second)])


def at_start(model: Path, layout: ParallelConfig, *, dtype: torch.dtype, distributed: bool) -> list[tuple[float, ...]]:
    """Of a policy that is its reference, see `values_at_start`."""
    engine = build(model, layout, dtype=dtype)
    batch = with_reference(engine, start_batch(engine))
    engine.prepare_training(dataclasses.replace(STANDING, distributed=distributed, overlap=distributed))
    return values_at_start(engine, batch)


def build(model: Path, layout: ParallelConfig, *, dtype: torch.dtype = torch.float32) -> Engine:
    config = read_hf_config(model)
    objective = OBJECTIVES["rm" if "reward" in model.name else "dpo"]()
    balance = {"moe_aux_loss_coeff": 0.1} if "experts" in model.name else {}
    engine = Engine(config, objective=objective, device=CPU, dtype=dtype, parallel=layout, **balance)
    for parameter in (p for chunk in engine.chunks for p in chunk.parameters()):
        parameter.data.fill_(torch.nan)  # what a load leaves out shows
    with on_device(CPU):
        load_hf_weights(engine.chunks, model, config, seed=5)
    return engine


def options(distributed: bool) -> Any:
    return dataclasses.replace(OPTIONS, distributed=distributed, overlap=distributed, clip_grad=1.0)


def plans_of(dp_size: int, multiple: int) -> list[StepPlan]:
    lengths = [lengths_of(make_pairs(sizes)) for sizes in SIZES]
    return [plan_step(each, dp_size=dp_size, max_tokens=60, microbatch_multiple=multiple) for each in lengths]


def batches_of(engine: Engine, plans: Plans) -> list[Batch]:
    """Both steps', against the engine's start as reference where it needs one."""
    batches = []
    for sizes, plan in zip(SIZES, plans or plans_of(engine.dp_size, engine.microbatch_multiple), strict=True):
        batch = make_batch(make_pairs(sizes, below=engine.hf_config.vocab_size), plan=plan)
        batches.append(with_reference(engine, batch) if engine.objective.needs_reference else batch)
    return batches


def outcome(engine: Engine, steps: list[Any]) -> dict[str, Any]:
    return {
        "values": [step.values.tolist() for step in steps],
        "norms": [step.grad_norm for step in steps],
        "balance": [step.moe_aux_loss or 0.0 for step in steps],  # none without experts
        "weights": parameters(engine),
    }


def on_one(ranks: int, name: str) -> tuple[str, Plans]:
    """The layout's micro-batches one after the other, and the directory of what one process finds with them."""
    layout, distributed, _ = LAYOUTS[ranks, name]
    dp_size = ranks // (layout.tensor * layout.pipeline * layout.context)
    multiple = layout.pipeline if layout.layers_per_virtual_stage else 1
    flat = (StepPlan((tuple(micro for rank in plan.ranks for micro in rank),)) for plan in plans_of(dp_size, multiple))
    return f"one {dp_size} {multiple} {distributed}", tuple(flat)


def fork(root: Path, size: int) -> None:
    """All ranks of a world of `size`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [multiprocessing.get_context("fork").Process(target=worker, args=(root, rank, size)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if codes := [rank.exitcode for rank in ranks if rank.exitcode]:
        sys.exit(f"{len(codes)} of {size} ranks failed")


def worker(root: Path, rank: int, size: int) -> None:
    """One rank: every layout of this number of ranks in turn."""
    os.environ["RANK"] = str(rank)
    for (ranks, name), (layout, distributed, models) in LAYOUTS.items():
        if ranks != size:
            continue
        parallel.initialize(layout, device=CPU, seed=5, virtual_stages=layout.virtual_stages(4))
        for model in models:
            place, one = root / name / model, root / on_one(ranks, name)[0] / model
            common = {"model": root / model, "layout": layout, "plans": None, "distributed": distributed}
            found = run(**common, place=place)
            found["resumed"] = [resumed(**{**common, "distributed": kind}, place=one) for kind in (False, True)]
            if model == "experts":
                build_in_bf16 = partial(build, root / model, layout, dtype=torch.bfloat16)
                save_by_both(build_in_bf16, place / "bf16", distributed=distributed)
            if "reward" not in model:
                for dtype in (torch.float32, torch.bfloat16):
                    found[f"start, {dtype}"] = at_start(root / model, layout, dtype=dtype, distributed=distributed)
            torch.save(found, place / f"rank{rank}.pt")
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


@pytest.fixture(scope="module")
def root(one_process: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and for each layout what one process found and saved, then what its ranks did."""
    root = tmp_path_factory.mktemp("layouts")
    for name, values in MODELS.items():
        save_tiny(root / name, **values)
    for (ranks, name), (_, distributed, models) in LAYOUTS.items():
        one, plans = on_one(ranks, name)
        for place in (root / one / model for model in models):
            if not place.exists():
                found = run(root / place.name, ParallelConfig(), plans, distributed=distributed, place=place)
                torch.save(found, place / "found.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return root


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_a_layout_changes_nothing(root: Path, ranks: int, name: str) -> None:
    for model in LAYOUTS[ranks, name][2]:
        place, one = root / name / model, root / on_one(ranks, name)[0] / model
        found, expected = [torch.load(place / f"rank{rank}.pt") for rank in range(ranks)], torch.load(one / "found.pt")
        for other in found:  # every rank knows every hash and every pair's values
            assert other["hashes"] == expected["hashes"]
            assert [other[key] for key in NUMBERS] == [found[0][key] for key in NUMBERS]
        files = sorted(file.name for file in (one / "exported").iterdir())
        assert files == sorted(file.name for file in (place / "exported").iterdir())
        for file in files:
            assert (place / "exported" / file).read_bytes() == (one / "exported" / file).read_bytes(), (model, file)
        if "reward" not in model:
            for dtype in (torch.float32, torch.bfloat16):
                assert found[0][f"start, {dtype}"] == UNMOVED, (model, dtype)
        assert_like(found[0], expected)


@pytest.mark.parametrize(("ranks", "name"), LAYOUTS)
def test_a_run_resumes_on_another_layout(root: Path, ranks: int, name: str) -> None:
    """From one process to these ranks and back, optimizer included, by one that is distributed and one that is not."""
    models = LAYOUTS[ranks, name][2]
    one, plans = on_one(ranks, name)
    for model in models:
        expected = torch.load(root / one / model / "found.pt")
        expected |= {key: expected[key][1:] for key in NUMBERS}
        for distributed in (False, True):
            assert_like(torch.load(root / name / model / "rank0.pt")["resumed"][distributed], expected)
            back = resumed(root / model, ParallelConfig(), plans, distributed=distributed, place=root / name / model)
            assert_like(back, expected)


@pytest.mark.parametrize(("ranks", "name"), [key for key, (_, _, models) in LAYOUTS.items() if "experts" in models])
def test_a_change_of_the_optimizers_kind_keeps_its_bits(root: Path, ranks: int, name: str) -> None:
    """Master weights, moments and steps in bf16."""
    build_in_bf16 = partial(build, root / "experts", ParallelConfig(), dtype=torch.bfloat16)
    assert_saved_alike(build_in_bf16, root / name / "experts" / "bf16")


def assert_like(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """1e-5 in the first step; beyond it Adam's signs differ where the gradient is about 0."""
    for i, (values, wanted) in enumerate(zip(found["values"], expected["values"], strict=True)):
        tolerance = 1e-4 if i or len(found["values"]) == 1 else 1e-5
        torch.testing.assert_close(torch.tensor(values), torch.tensor(wanted), rtol=tolerance, atol=tolerance)
        assert found["norms"][i] == pytest.approx(expected["norms"][i], rel=tolerance)
        assert found["balance"][i] == pytest.approx(expected["balance"][i], rel=tolerance)
    assert_near(found["weights"], expected["weights"], tolerance=1e-4)


if __name__ == "__main__":
    for size in (2, 4):
        fork(Path(sys.argv[1]), size)
