"""Optimizer state from a checkpoint, whichever kind of optimizer saved it: split over data-parallel ranks, or plain.

Both keep what belongs to a parameter under its name and in its shape, on every layout: `optimizer.state.exp_avg.NAME` and
`exp_avg_sq`. Master weights are `param.NAME` of the distributed optimizer and `fp32_param.NAME` of the plain one; in fp32 the
weights are their own masters. So a change of kind changes names, and the few plain values around them, of which the number
of steps alone is not the flags' to say.

Invariant: masters and moments are the checkpoint's, bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

HYPER_PARAMETERS = ("lr", "min_lr", "max_lr", "weight_decay", "betas", "eps", "wd_mult", "start_wd", "end_wd")
DISTRIBUTED = "param_state_sharding_type"  # a plain value of the distributed optimizer's state alone


def ask_as_saved(optimizer: Any, request: dict[Any, Any], *, distributed: bool) -> None:
    """Turn a request for this optimizer's state into one that a checkpoint of the other kind serves; `distributed`: that
    one's kind."""
    for part, own in _parts(optimizer, request):
        if distributed:
            own.get("optimizer", own).pop("param_groups")
            _rename(own.get("fp32_from_fp16_params", {}), "fp32_param", "param")
        elif part.config.bf16:
            _rename(own["param_state"], "param", "fp32_param")
        else:
            for tensors in own["param_state"].values():
                del tensors["param"]


def load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Take moments, master weights and step counts from a checkpoint of either kind; keep the flags' hyper-parameters."""
    kept = [{k: group[k] for k in HYPER_PARAMETERS if k in group} for group in optimizer.param_groups]
    parts = [_as_own(part, saved) for part, saved in _parts(optimizer, state)]
    optimizer.load_state_dict(parts[0] if len(parts) == 1 else dict(enumerate(parts)))
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def _parts(optimizer: Any, state: dict[Any, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """megatron's optimizers, that of the experts is one of its own, and the state of each."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return zip(chained, [state] if len(chained) == 1 else [state[i] for i in range(len(chained))], strict=True)


def _rename(tensors: Any, kind: str, other: str) -> None:
    for tensor in nested_values(tensors):
        tensor.key = tensor.key.replace(f"optimizer.state.{kind}.", f"optimizer.state.{other}.", 1)


def _as_own(part: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """What `part` loads: `saved` if its kind saved it, else the loaded tensors among plain values of its own."""
    distributed = isinstance(part, DistributedOptimizer)
    if (DISTRIBUTED in saved) == distributed:
        return saved
    step = _steps(saved)
    if distributed:
        groups = [{**group, "step": step} for group in part.state_dict()["optimizer"]["param_groups"]]
        return {"optimizer": {"param_groups": groups}, "param_state": saved["param_state"], DISTRIBUTED: "fully_reshardable"}
    groups, masters = part.optimizer.state_dict()["param_groups"], saved.get("fp32_from_fp16_params")
    state = (saved if masters is None else saved["optimizer"])["state"]
    if isinstance(part.optimizer, torch.optim.AdamW):
        state = {**state, "common_step": torch.tensor(float(step))}
    else:
        groups = [{**group, "step": step} for group in groups]
    own = {"state": state, "param_groups": groups}
    return own if masters is None else {"optimizer": own, "fp32_from_fp16_params": masters}


def _steps(saved: dict[str, Any]) -> int:
    """How many steps the optimizer that saved this had made: of torch's plain one a common value, else one in each group."""
    inner = saved.get("optimizer", saved)
    common = inner.get("state", {}).get("common_step")
    return int(inner["param_groups"][0]["step"] if common is None else common)
