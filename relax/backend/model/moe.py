"""Mixture of experts: which experts a token takes, the experts themselves, and the loss that balances them.

megatron-core's MoE layer sends tokens to the ranks that hold their experts and back. Three of its parts are replaced: the
router computes what transformers does (softmax in fp32 over all experts, then the best); the experts of a rank are two weights,
`[experts, ...]` each, so that one grouped product takes them all at once where the device has that; and the
dispatcher adds a token's outputs in one order, where megatron's scatter adds in any on a GPU and no two passes would agree.

The balancing loss of a micro-batch and layer is E sum_i f_i P_i (Fedus 2021, eq. 4): f_i the share of assignments that went to
expert i, P_i its mean probability, over the real tokens, padding aside; 1 where all is even. The step minimises

    mean over groups of the loss  +  coefficient * sum over layers of the mean over groups of their micro-batch's balancing loss

Invariants: every rank's part counts once, also under tensor, context, expert and pipeline parallelism and recompute; a
micro-batch without groups counts nothing. It depends on the packing plan, unlike everything else a step minimises.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from relax.backend.model.layers import ModelConfig, SwiGLU
from relax.backend.model.layout import PackedLayout


def moe_options(config: Any) -> dict[str, Any]:
    """megatron-core's options for the experts of a Hugging Face config."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",  # Router's probabilities are
        "moe_router_load_balancing_type": "none",  # Router has its own
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def use_own_experts(layer: ModuleSpec) -> None:
    """Put the router and the experts of this file into megatron-core's spec of an MoE layer."""
    moe = layer.submodules.mlp.submodules
    moe.router, moe.experts = Router, ModuleSpec(module=Experts)


class Router(TopKRouter):
    """Weights [rows, experts] of each token's chosen experts, and which these are."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.layout: PackedLayout | None = None  # of the micro-batch at hand, see `adopt_layers`
        self.balance: torch.Tensor | float = 0.0  # this rank's part of the loss times groups, summed over micro-batches

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(input.flatten(0, 1), self.weight)
        probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        best, chosen = probs.topk(self.topk, -1)
        if not self.config.moe_router_pre_softmax:
            best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(logits).scatter(1, chosen, best.to(logits.dtype))
        taken = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        # Under recompute the first forward pass has no gradients: the loss is attached and counted in the second alone.
        if self.config.moe_aux_loss_coeff and self.training and torch.is_grad_enabled():
            weights = self._attach_balance(weights, probs, taken)
        return weights, taken

    def _attach_balance(self, weights: torch.Tensor, probs: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        assert layout is not None
        if not layout.num_groups:
            return weights
        real = layout.real
        if self.config.sequence_parallel:
            real = real.chunk(self.tp_group.size())[self.tp_group.rank()]
        counts = (taken & real[:, None]).sum(0)
        dist.all_reduce(counts, group=self.tp_cp_group)
        assignments = counts.sum()
        mass = (probs * real[:, None]).sum(0)  # of this rank's tokens; the loss is the sum of the ranks' parts
        loss = (mass * counts).sum() * self.num_experts * self.topk / assignments**2
        loss = loss * layout.num_groups  # the schedule divides by the step's groups
        self.balance = self.balance + loss.detach()
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(weights, loss * self.config.moe_aux_loss_coeff)
        return attached


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's, by permutations and a sum over each token's experts instead of its scatters."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [rows, 1, hidden_size] -> a row for each assignment and its weight, sorted by expert, then token."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        order = routing_map.nonzero()[:, 1].argsort(stable=True)
        self.back = order.argsort()
        tokens = hidden_states.expand(-1, self.config.moe_router_topk, -1).flatten(0, 1)
        return tokens.index_select(0, order), probs.masked_select(routing_map).index_select(0, order)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that came back -> their sums by token."""
        return rows.index_select(0, self.back).unflatten(0, (-1, self.config.moe_router_topk)).sum(1).view(self.hidden_shape)


def adopt_layers(layers: Any) -> None:
    """Give layers the dispatcher of this file, and each router the layout of the micro-batch that passes.

    Layers are told as they run, so also when they run again in recompute.
    """

    def tell(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer.mlp.router.layout = kwargs["packed_seq_params"]

    for layer in layers:
        layer.mlp.token_dispatcher.__class__ = Dispatcher
        layer.register_forward_pre_hook(tell, with_kwargs=True)


def take_balance(chunks: Sequence[Any], *, num_groups: int, device: torch.device) -> float | None:
    """The step's balancing loss, a mean over layers and groups, and the count starts anew; None without a coefficient.

    Collective over all ranks.
    """
    config = chunks[0].config
    if not (config.num_moe_experts and config.moe_aux_loss_coeff):
        return None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for router in (layer.mlp.router for chunk in chunks for layer in chunk.decoder.layers):
        total += router.balance
        router.balance = 0.0
    dist.all_reduce(total)
    return float(total) / (config.num_layers * max(num_groups, 1))


class Experts(MegatronModule):
    """This rank's experts: down(silu(gate x) * up x) for the rows of each, rows sorted by expert.

    weight1 [experts, gate and up width, hidden_size], weight2 [experts, hidden_size, width]; tensor parallelism splits the
    width. In a checkpoint they are megatron-core's `linear_fc1` and `linear_fc2`, one axis of experts before their own two.
    """

    def __init__(self, num_local_experts: int, config: ModelConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        self.groups, self.activation = pg_collection, SwiGLU(config)
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        shapes = (num_local_experts, 2 * width, hidden), (num_local_experts, hidden, width)
        self.weight1, self.weight2 = (torch.nn.Parameter(torch.empty(s, dtype=config.params_dtype)) for s in shapes)
        for weight, axis in ((self.weight1, 1), (self.weight2, 2)):
            set_tensor_model_parallel_attributes(weight, True, axis, 1)
            # Gradients go over the ranks that hold the same experts, and the optimizer is one of its own, on every layout.
            weight.allreduce = False  # type: ignore[attr-defined]  # megatron reads it

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
        """rows [assignments, hidden_size] and their router weights [assignments], sorted by expert -> their outputs."""
        multiply = self.config.ops.grouped_linear
        inner = self.activation(multiply(rows, self.weight1, tokens_per_expert)) * weights[:, None]
        return multiply(inner, self.weight2, tokens_per_expert), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict[str, Any]:
        first, (ep, etp) = len(sharded_offsets), (self.groups.ep, self.groups.expt_tp)
        replica = (0, 0, self.groups.expt_dp.rank())

        def shard(key: str, data: torch.Tensor, axis: int, part: int, parts: int) -> ShardedTensor:
            split = (first, ep.rank(), ep.size()), (first + axis, part, parts)
            return ShardedTensor.from_rank_offsets(
                key, data, *sharded_offsets, *split, replica_id=replica, prepend_axis_num=first
            )

        def gate_and_up(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
            return [shard(key, half, 1, i * etp.size() + etp.rank(), 2 * etp.size()) for i, half in enumerate(data.chunk(2, 1))]

        key = f"{prefix}experts.linear_fc"
        return {
            f"{prefix}weight1": ShardedTensorFactory(
                f"{key}1.weight", self.weight1, gate_and_up, lambda halves: torch.cat(halves, 1), replica
            ),
            f"{prefix}weight2": shard(f"{key}2.weight", self.weight2, 2, etp.rank(), etp.size()),
        }
