"""The engine: one model object that scores completions, trains on them, and saves and restores itself.

A step is megatron-core's own schedule over this rank's micro-batches in its per-token-loss mode with groups as the tokens:
losses are summed over groups (a pair, or another prompt with its completions) and gradients are divided once by the global
number of groups, so neither depends on how groups are packed, accumulated or spread over ranks. Values of each group come back
as one table in the step's order, the same on every rank: metrics are means over its rows, never means of means.

An objective that couples the groups of a batch has the whole step scored first, without gradients. Its loss's gradient with
respect to each score is then what that score is multiplied by in the training pass, so that no statistic depends on packing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from relax.backend.device import fuses_weight_gradients, runs_on_device
from relax.backend.model.families import HFConfig, head_dim
from relax.backend.model.layout import Group, PackedLayout, build_layout
from relax.backend.model.moe import take_balance
from relax.backend.model.preference_model import PreferenceModel, transformer_config
from relax.backend.ops import choose_ops
from relax.backend.optimizer import OptimizerOptions, build_optimizer, build_scheduler
from relax.backend.parallel import ParallelConfig
from relax.objectives import Objective, Scores
from relax.packing import StepPlan

Layouts = tuple[tuple[np.ndarray, PackedLayout], ...]  # (positions of its groups in the step, layout) of each micro-batch


class GroupList(Protocol):
    """Groups by position, read when asked for, so that a rank reads only its own."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> Group: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one global step and where they go.

    groups: indexable by position in the step; lengths [num_groups, 1 + K]: tokens of the prompt and of each completion, 0 where
    a group has fewer than K; references [num_groups, K]: the reference's score of each completion, where the objective needs
    them; ranks [num_groups, K]: of each completion from 1, where any are equally good; columns {name: [num_groups]}: numbers of
    the rows; layouts: what `Engine.lay_out` gave, where they were read ahead.
    """

    groups: GroupList
    plan: StepPlan
    lengths: np.ndarray
    references: np.ndarray | None = None
    ranks: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    layouts: Layouts | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """values [num_groups, metrics], in the objective's order; grad_norm before clipping; the learning rate used.

    moe_aux_loss: the routers' balancing loss without its coefficient, a mean over layers and groups; None where it has none.
    """

    values: np.ndarray
    grad_norm: float
    lr: float
    moe_aux_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Coupling:
    """An objective over a whole step: metrics [num_groups, metrics]; weights [num_groups, K], the derivative of the summed loss
    by each score; where a completion is present [num_groups, K]; and what the objective remembers after the step."""

    metrics: np.ndarray
    weights: np.ndarray
    present: np.ndarray
    state: Mapping[str, float]


# (positions of a micro-batch's groups, its sequences' scores) -> (loss to minimise, the groups' values [num_groups, width])
GroupFunction = Callable[[np.ndarray, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Engine:
    """One policy or reward model on this rank's device."""

    def __init__(
        self,
        hf_config: HFConfig,
        *,
        objective: Objective,
        device: torch.device,
        dtype: torch.dtype,
        parallel: ParallelConfig,
        attention: str = "auto",
        **config_overrides: Any,
    ) -> None:
        self.hf_config, self.objective = hf_config, objective
        self.device, self.dtype, self.parallel = device, dtype, parallel
        self.ops = choose_ops(device, dtype, head_dim=head_dim(hf_config), attention=attention)
        self._overrides = config_overrides
        self.chunks: list[PreferenceModel] = self._build_chunks()
        self.config = self.chunks[0].config
        self.dp_size: int = parallel_state.get_data_parallel_world_size()
        self.objective_state: Mapping[str, float] = objective.initial_state
        self.distributed_optimizer = False
        self.wrapped: list[DistributedDataParallel] = []
        self.optimizer: Any = None
        self.scheduler: Any = None

    @runs_on_device
    def _build_chunks(self) -> list[PreferenceModel]:
        stages = self.parallel.virtual_stages(self.hf_config.num_hidden_layers)
        config = transformer_config(
            self.hf_config,
            dtype=self.dtype,
            ops=self.ops,
            sequence_parallel=self.parallel.sequence,
            virtual_pipeline_model_parallel_size=stages,
            overlap_p2p_comm=stages is not None,  # batched exchange fails under the interleaved schedule
            batch_p2p_comm=stages is None,
            gradient_accumulation_fusion=fuses_weight_gradients(self.device),
            **self._overrides,
        )
        return [
            PreferenceModel(config, self.hf_config, head=self.objective.head, vp_stage=stage).to(self.device)
            for stage in (range(stages) if stages else [None])
        ]

    @property
    def microbatch_multiple(self) -> int:
        """What the number of micro-batches must divide by: the interleaved schedule takes multiples of the pipeline size."""
        return self.parallel.pipeline if self.parallel.layers_per_virtual_stage else 1

    @property
    def num_parameters(self) -> int:
        """Parameters on this rank."""
        return sum(p.numel() for chunk in self.chunks for p in chunk.parameters())

    @runs_on_device
    def prepare_training(self, options: OptimizerOptions) -> None:
        """Allocate gradients, master weights and optimizer state for the weights as they are now."""
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=options.distributed,
            overlap_grad_reduce=options.overlap,
        )
        self.wrapped = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(self.chunks)
        ]
        self.distributed_optimizer = options.distributed
        self.optimizer = build_optimizer(self.wrapped, options)
        self.scheduler = build_scheduler(self.optimizer, options)
        self.config.finalize_model_grads_func = finalize_model_grads
        if options.overlap:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    def score(self, batch: Batch) -> np.ndarray:
        """Scores [num_groups, K] of the completions, without gradients: summed log-probs (lm head) or rewards (scalar head); 0
        where a group has fewer than K."""
        width = batch.lengths.shape[1] - 1

        def raw(positions: np.ndarray, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            table = scores.new_zeros(len(positions) * width)
            table[self._tensor(np.flatnonzero(batch.lengths[positions, 1:]))] = scores
            return scores.sum(), table.view(-1, width)

        return self._run(batch, raw, width=width, train=False)

    def evaluate(self, batch: Batch) -> np.ndarray:
        """The objective's metrics of each group, [num_groups, metrics], without gradients."""
        if self.objective.coupled:
            return self._couple(batch).metrics
        return self._run(batch, partial(self._losses, batch), width=len(self.objective.metrics), train=False)

    @runs_on_device
    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step on the mean loss of the batch's groups."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        coupling = self._couple(batch) if self.objective.coupled else None
        function = partial(self._weigh, coupling) if coupling else partial(self._losses, batch)
        values = self._run(batch, function, width=len(self.objective.metrics), train=True)
        if coupling:
            self.objective_state = coupling.state
        balance = take_balance(self.chunks, num_groups=len(batch.groups), device=self.device)
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        return StepResult(values=values, grad_norm=float(grad_norm), lr=float(lr), moe_aux_loss=balance)

    def _losses(self, batch: Batch, positions: np.ndarray, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses, metrics = self.objective(self._scores(batch, positions, scores))
        return losses.sum(), torch.stack([metrics[metric.name] for metric in self.objective.metrics], 1)

    def _scores(self, batch: Batch, positions: np.ndarray, values: torch.Tensor) -> Scores:
        """What the objective is given of the groups at `positions`: a few numbers, exact in fp64 beside fp32 scores."""
        lengths = batch.lengths[positions, 1:]
        present = lengths > 0

        def numbers(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.float64)).to(values.device)

        return Scores(
            values=values.double(),
            lengths=numbers(lengths[present]),
            group=torch.from_numpy(np.nonzero(present)[0]).to(values.device),
            reference=None if batch.references is None else numbers(batch.references[positions][present]),
            ranks=None if batch.ranks is None else numbers(batch.ranks[positions][present]),
            columns={name: numbers(column[positions]) for name, column in batch.columns.items()},
            state=self.objective_state,
        )

    def _couple(self, batch: Batch) -> Coupling:
        """The objective over all groups of the step, scored without gradients; the same on every rank."""
        present = batch.lengths[:, 1:] > 0
        values = torch.from_numpy(self.score(batch)[present])
        with torch.enable_grad():
            values.requires_grad_()
            scores = self._scores(batch, np.arange(len(batch.groups)), values)
            losses, metrics = self.objective(scores)
            (gradient,) = torch.autograd.grad(losses.sum(), values)
        table = torch.stack([metrics[metric.name] for metric in self.objective.metrics], 1)
        weights = np.zeros(present.shape)
        weights[present] = gradient.numpy()
        with torch.no_grad():
            return Coupling(table.detach().numpy(), weights, present, self.objective.next_state(scores))

    def _weigh(self, coupling: Coupling, positions: np.ndarray, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = coupling.weights[positions][coupling.present[positions]]
        return (scores.double() * self._tensor(weights)).sum(), self._tensor(coupling.metrics[positions])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @runs_on_device
    def _run(self, batch: Batch, function: GroupFunction, *, width: int, train: bool) -> np.ndarray:
        """megatron's schedule over this rank's micro-batches; the values of all ranks' groups, [num_groups, width] fp64."""
        layouts = self.lay_out(batch) if batch.layouts is None else batch.layouts
        work = [(positions, layout.to(self.device)) for positions, layout in layouts]
        model = self.wrapped or self.chunks
        speaks = parallel_state.get_context_parallel_rank() == 0

        def forward_step(iterator: Iterator[tuple[np.ndarray, PackedLayout]], chunk: Any) -> Any:
            positions, layout = next(iterator)
            output = chunk(layout.ids[None], None, None, packed_seq_params=layout)

            def loss_function(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
                loss, values = function(positions, scores)
                count = torch.tensor(len(positions) if speaks else 0, dtype=torch.int, device=self.device)
                return loss, count, (positions, values.detach().double())

            return output, loss_function

        for chunk in model:
            chunk.train(train)
        with torch.set_grad_enabled(train):
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(work) for _ in model] if len(model) > 1 else iter(work),
                model=model if len(model) > 1 else model[0],
                num_microbatches=len(work),
                seq_length=max(layout.ids.size(0) for _, layout in work),
                micro_batch_size=1,
                forward_only=not train,
            )
        return self._gather(results if speaks else [], num_groups=len(batch.groups), width=width)

    def lay_out(self, batch: Batch) -> Layouts:
        """This rank's micro-batches, read and laid out in main memory; a thread may do it while a step computes."""
        plan = batch.plan.ranks[parallel_state.get_data_parallel_rank()]
        return tuple((np.array(micro.groups, dtype=np.int64), self._layout(batch, micro)) for micro in plan)

    def _layout(self, batch: Batch, micro: Any) -> PackedLayout:
        return build_layout(
            [batch.groups[i] for i in micro.groups],
            micro.shared,
            head=self.objective.head,
            device=torch.device("cpu"),
            token_weights=self.objective.token_weights if self.objective.weighs_tokens else None,
            multiple=self.parallel.tensor if self.parallel.sequence else 1,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
        )

    def _gather(self, results: list[tuple[np.ndarray, torch.Tensor]], *, num_groups: int, width: int) -> np.ndarray:
        """Each group's values come from one rank; adding zeros to them changes no bit."""
        table = torch.zeros(num_groups, width, dtype=torch.float64, device=self.device)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            for positions, values in results:
                table[self._tensor(positions)] = values
        dist.all_reduce(table)
        gathered: np.ndarray = table.cpu().numpy()
        return gathered
