"""What a checkpoint holds: sharded model and optimizer tensors, and plain values (scheduler, random states, step)."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from relax.backend.device import on_device
from relax.backend.engine import Engine
from relax.backend.optimizer import schedule_changes
from relax.backend.optimizer_state import ask_as_saved, load_optimizer


def model_state(engine: Engine) -> dict[str, Any]:
    """megatron's sharded tensors of the model, under names that no parallel layout changes."""
    with on_device(engine.device):
        chunks = [chunk.sharded_state_dict(metadata=sharding_metadata()) for chunk in engine.chunks]
    return {f"chunk{i}": state for i, state in enumerate(chunks)}


def load_model_state(engine: Engine, state: dict[str, Any], *, strict: bool = True) -> None:
    """Take the model's tensors; strict: all of them must be there."""
    with on_device(engine.device):
        for i, chunk in enumerate(engine.chunks):
            chunk.load_state_dict(state[f"chunk{i}"], strict=strict)


def training_state(
    engine: Engine, *, step: int, optimizer: bool, rng: bool, loading: bool, distributed: bool | None = None
) -> dict[str, Any]:
    """Everything a resumed run needs, to save or, with `loading`, to load into.

    distributed: whether the optimizer that saved it was split over data-parallel ranks (None: as this one is).
    """
    state: dict[str, Any] = {"model": model_state(engine), "step": step}
    if optimizer:
        with on_device(engine.device):
            state["optimizer"] = engine.optimizer.sharded_state_dict(
                state["model"], is_loading=loading, metadata=sharding_metadata()
            )
        if distributed not in (None, engine.distributed_optimizer):
            ask_as_saved(engine.optimizer, state["optimizer"], distributed=distributed)
        state["scheduler"] = engine.scheduler.state_dict()
    if rng:
        state["rng"] = _random_states()
    return state


def load_training_state(engine: Engine, state: dict[str, Any]) -> list[str]:
    """Restore what `state` holds; returns what this run's schedule does otherwise than the checkpoint's."""
    load_model_state(engine, state["model"])
    changes: list[str] = []
    if "optimizer" in state:
        with on_device(engine.device):
            load_optimizer(engine.optimizer, state["optimizer"])
        changes = schedule_changes(state["scheduler"], engine.scheduler)
        engine.scheduler.load_state_dict(state["scheduler"])
    elif engine.optimizer is not None:  # never beside loaded master weights: bf16 would overwrite them
        with on_device(engine.device):
            engine.optimizer.reload_model_params()
    if "rng" in state:
        _set_random_states(state["rng"])
    return changes


def sharding_metadata() -> dict[str, Any]:
    """What megatron's `sharded_state_dict` must be told."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _random_states() -> dict[str, Any]:
    """Training draws no random number once it has started (order, head and dropout are functions of flags), so one rank's
    states serve all and any layout."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
