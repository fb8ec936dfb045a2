"""One rank of test_layouts.py: under each layout of the job in turn, loads, hashes, scores, exports and trains each model,
and resumes what one process and the layout before it saved.

One start serves all layouts, since imports cost more than the work.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from relax.backend import parallel
from relax.backend.device import on_device
from relax.backend.engine import Batch, Engine
from relax.backend.model.families import read_hf_config
from relax.backend.weights.export import export_hf
from relax.backend.weights.hugging_face import load_hf_weights, weight_hashes
from relax.errors import UserError
from relax.objectives import OBJECTIVES, Objective
from relax.packing import plan_step
from relax.training.memory import stage_parameters
from tests.engines import (
    COUPLED,
    STANDING,
    coupled_steps,
    save_by_both,
    start_batch,
    train_and_resume,
    values_at_start,
    with_reference,
)
from tests.models import random_pairs

CPU = torch.device("cpu")


def main(directory: Path) -> None:
    job = json.loads((directory / "job.json").read_text())
    saved = directory / "one"  # the checkpoints of the layout before
    for name, values in job["layouts"].items():
        distributed, overrides = values.pop("distributed", False), values.pop("overrides", {})
        layout = parallel.ParallelConfig(**values)
        parallel.initialize(layout, device=CPU, seed=job["seed"], virtual_stages=layout.virtual_stages(4))
        output = directory / name
        results: dict[str, Any] = {}
        for model, head in job["models"].items():
            path = Path(model)
            results[path.name] = run(path, head, layout, seed=job["seed"], output=output / path.name)
            if path.name in job["trained"]:
                options = {"seed": job["seed"], "distributed": distributed, "overrides": overrides}
                results[path.name]["trained"] = train(path, head, layout, save=output / "saved" / path.name, **options)
                results[path.name]["resumed"] = [
                    train(path, head, layout, load=saved / "saved" / path.name, **{**options, "distributed": kind})
                    for kind in (False, True)
                ]
                build_in_bf16 = partial(filled, path, head, layout, seed=job["seed"], dtype=torch.bfloat16, **overrides)
                save_by_both(build_in_bf16, output / "bf16" / path.name, distributed=distributed)
                if head == "lm":
                    for dtype in (torch.float32, torch.bfloat16):
                        results[path.name][f"start, {dtype}"] = at_start(path, layout, dtype=dtype, **options)
        coupled = next(Path(model) for model, head in job["models"].items() if head == "lm")
        results["coupled"] = coupled_steps(filled(coupled, "lm", layout, seed=job["seed"], objective=COUPLED))
        saved = output
        results["error"] = refused(Path(job["contradiction"]), layout)
        torch.save(results, output / f"rank{dist.get_rank()}.pt")
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


def train(
    model: Path,
    head: str,
    layout: parallel.ParallelConfig,
    *,
    seed: int,
    distributed: bool,
    overrides: dict[str, Any],
    **places: Path,
) -> dict[str, list[Any]]:
    """Steps and a checkpoint among `places`, see `train_and_resume`."""
    engine = filled(model, head, layout, seed=seed, **overrides)
    return train_and_resume(engine, distributed=distributed, **places)


def at_start(
    model: Path, layout: parallel.ParallelConfig, *, dtype: torch.dtype, seed: int, distributed: bool, overrides: dict[str, Any]
) -> list[tuple[float, ...]]:
    """Of a policy that is its reference, see `values_at_start`."""
    engine = filled(model, "lm", layout, seed=seed, dtype=dtype, **overrides)
    batch = with_reference(engine, start_batch(engine))
    engine.prepare_training(dataclasses.replace(STANDING, distributed=distributed, overlap=distributed))
    return values_at_start(engine, batch)


def filled(model: Path, head: str, layout: parallel.ParallelConfig, *, seed: int, **options: Any) -> Engine:
    """`build` with the model's weights."""
    engine = build(model, head, layout, **options)
    with on_device(CPU):
        load_hf_weights(engine.chunks, model, engine.hf_config, seed=seed)
    return engine


def build(
    model: Path,
    head: str,
    layout: parallel.ParallelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    objective: Objective | None = None,
    **overrides: Any,
) -> Engine:
    objective = objective or OBJECTIVES["dpo" if head == "lm" else "rm"]()
    engine = Engine(read_hf_config(model), objective=objective, device=CPU, dtype=dtype, parallel=layout, **overrides)
    for chunk in engine.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    return engine


def run(model: Path, head: str, layout: parallel.ParallelConfig, *, seed: int, output: Path) -> dict[str, Any]:
    engine = build(model, head, layout)
    config = engine.hf_config
    with on_device(CPU):
        load_hf_weights(engine.chunks, model, config, seed=seed)
        check_padding(engine)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        assert engine.num_parameters == stage_parameters(config, layout, head=engine.objective.head, stage=stage).total
        hashes = weight_hashes(engine.chunks, config)
        export_hf(engine.chunks, config, source=model, output=output)
    pairs = random_pairs(vocab_size=config.vocab_size)
    output.parent.mkdir(exist_ok=True)
    lengths = np.array([[len(p.prompt), len(p.chosen), len(p.rejected)] for p in pairs])
    plan = plan_step(
        lengths,
        dp_size=engine.dp_size,
        max_tokens=200,
        share_prompt=False,
        microbatch_multiple=engine.microbatch_multiple,
    )
    return {
        "hashes": hashes,
        "scores": engine.score(Batch(groups=pairs, plan=plan, lengths=lengths)).reshape(-1).tolist(),
    }


def check_padding(engine: Engine) -> None:
    """Every parameter was filled; the vocabulary's rows beyond the model's own are zero."""
    size, rank = engine.parallel.tensor, parallel_state.get_tensor_model_parallel_rank()
    for chunk in engine.chunks:
        for name, parameter in chunk.named_parameters():
            assert parameter.isfinite().all(), name
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                real = engine.hf_config.vocab_size - rank * parameter.size(0)
                assert parameter.size(0) == -(-engine.hf_config.vocab_size // size)
                assert (parameter[real:] == 0).all() and (parameter[:real] != 0).any(1).all(), name


def refused(model: Path, layout: parallel.ParallelConfig) -> str:
    """What this rank says of a directory in which only some ranks can see the fault."""
    engine = build(model, "lm", layout)
    try:
        with on_device(CPU):
            load_hf_weights(engine.chunks, model, engine.hf_config, seed=0)
    except UserError as error:
        return str(error)
    return "loaded"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
