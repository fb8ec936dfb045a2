"""AdamW and its schedule: megatron-core's optimizer (fp32 master weights, clipping, distributed or not) and scheduler."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """AdamW (Loshchilov & Hutter 2019) and its learning-rate schedule over `total_steps` optimizer steps.

    warmup_steps: linear from 0; decay_style: constant, linear, cosine or WSD (stable, then linear over the last tenth).
    """

    lr: float
    min_lr: float
    decay_style: str
    warmup_steps: int
    total_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_grad: float
    distributed: bool
    overlap: bool


def build_optimizer(chunks: list[DistributedDataParallel], options: OptimizerOptions) -> Any:
    """megatron's optimizer over the model chunks of this rank."""
    dtype = chunks[0].module.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=options.distributed,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    # The norm of all gradients is that of the parts' norms: megatron's distributed ones would take one over all tensors.
    optimizer.grads_states_parallel_group_is_shared = lambda: False
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if options.distributed:
            part.__class__ = GatheringDistributedOptimizer
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)  # one pass over memory; megatron builds it without
            if options.distributed:
                TorchAdamDistributedOptimizer.adopt(part)
    return optimizer


def build_scheduler(optimizer: Any, options: OptimizerOptions) -> OptimizerParamScheduler:
    """The learning rate of step s (from 1) is the schedule's value after s - 1 steps; flags win over a checkpoint's values."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=options.total_steps,
        lr_decay_style=options.decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=max(2, options.total_steps // 10),
        lr_wsd_decay_style="linear",
    )


def schedule_changes(saved: dict[str, Any], scheduler: OptimizerParamScheduler) -> list[str]:
    """What a resumed run's schedule does otherwise than the checkpoint's: "max_lr 1e-06 -> 5e-07"."""
    current = scheduler.state_dict()
    return [
        f"{name} {saved[name]} -> {value}"
        for name, value in current.items()
        if name != "num_steps" and "wd" not in name and name in saved and saved[name] != value
    ]


STATES = ("param", "exp_avg", "exp_avg_sq")
PIECE = 1 << 22  # fp32 values of each rank that are gathered at once


class GatheringDistributedOptimizer(DistributedOptimizer):
    """megatron's distributed optimizer, whose state is gathered for a checkpoint as it lies, and in one copy.

    megatron gathers it without the padding between its buffer's buckets, then cuts each parameter's out at its place with that
    padding: with several buckets (tied embeddings over pipeline stages, gradients reduced in overlap) a checkpoint held shifted
    master weights and moments. It also keeps the whole on every rank, after eight copies.
    """

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's shards. A rank alone holds whole parameters, and gives them in the model's order: their gradient norm
        then has the plain optimizer's bits."""
        if self.data_parallel_group.size() > 1:
            return super().get_parameters()
        places = [self.model_param_group_index_map.get(p) for chunk in self.model_chunks for p in chunk.parameters()]
        groups = self.optimizer.param_groups
        return [groups[place[0]]["params"][place[1]] for place in sorted(filter(None, places), key=lambda place: place[0])]

    def get_parameter_state_dp_zero(self, *_: Any, empty_data: bool = False, **__: Any) -> dict[Any, Any]:
        """Per buffer, its fp32 states [numel] on the CPU of the first data-parallel rank; with `empty_data` zeros on all."""
        first = self.data_parallel_group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, buffer in enumerate(self.buffers):
            ((dtype, ranges),) = self.gbuf_ranges[index].items()
            device = "cpu" if first or empty_data else "meta"  # the others write nothing
            whole = {name: torch.zeros(buffer.numel, dtype=torch.float32, device=device) for name in STATES}
            for bucket, part in [] if empty_data else zip(buffer.buckets, ranges, strict=True):
                for name in STATES:
                    self._gather(name, bucket, part["param_map"], into=whole[name] if first else None)
            state[index] = {dtype: whole}
        return state

    def _gather(
        self, name: str, bucket: Any, own: dict[torch.nn.Parameter, dict[str, Any]], *, into: torch.Tensor | None
    ) -> None:
        """A bucket's state, from what each rank owns of it, to its place in the buffer's on the group's first rank.

        It passes through the device in small pieces: training may have filled the memory there.
        """
        group, device = self.data_parallel_group, bucket.grad_data.device
        shard = torch.zeros(bucket.grad_data.numel() // group.size(), dtype=torch.float32)
        for parameter, at in own.items():
            place = at["gbuf_local"]
            shard[place.start : place.end] = self._get_main_param_and_optimizer_states(parameter)[name]
        for start in range(0, shard.numel(), PIECE):
            piece = shard[start : start + PIECE].to(device)
            if into is None:
                dist.gather(piece, group=group, group_dst=0)
                continue
            parts = [torch.empty_like(piece) for _ in range(group.size())]
            dist.gather(piece, parts, group=group, group_dst=0)
            for rank, part in enumerate(parts):
                first = bucket.offset + rank * shard.numel() + start
                into[first : first + part.numel()] = part

    def _set_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        """Where the weights are their own masters, and loaded already, `tensors` may lack "param"."""
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for name, tensor in tensors.items():
            (main if name == "param" else self.optimizer.state[main][name]).copy_(tensor)


class TorchAdamDistributedOptimizer(GatheringDistributedOptimizer):
    """megatron's distributed optimizer over torch's AdamW (no Transformer Engine or apex).

    torch keeps a `step` tensor per parameter, which megatron's sharded state does not expect: before the first step it
    asserts, on load it misses the key, and afterwards it gives all parameters one shared tensor, which then counts every
    parameter's update as a step.
    """

    @classmethod
    def adopt(cls, optimizer: DistributedOptimizer) -> None:
        """Turn a freshly built optimizer into this class and allocate its state."""
        optimizer.__class__ = cls
        for group in optimizer.optimizer.param_groups:
            for p in group["params"]:
                optimizer.optimizer.state[p] = {
                    "step": torch.tensor(0.0, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def _get_main_param_and_optimizer_states(self, model_param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        tensors.pop("step", None)
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()
