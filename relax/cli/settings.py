"""From parsed flags to the named parameters that each part takes. Below the commands, nothing sees the parsed flags."""

import argparse
from typing import Any

from relax.backend.model.families import HFConfig, attention_window
from relax.backend.optimizer import OptimizerOptions
from relax.backend.parallel import ParallelConfig
from relax.data import DataOptions, GroupDataset
from relax.errors import UserError
from relax.objectives import Objective
from relax.training.batches import Batches, Packing


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    return ParallelConfig(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        layers_per_virtual_stage=args.num_layers_per_virtual_pipeline_stage,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size,
        sequence=args.sequence_parallel,
    )


def data_options(args: argparse.Namespace, *, objective: Objective) -> DataOptions:
    return DataOptions(
        max_length=args.preference_max_length,
        max_completion_length=args.preference_max_completion_length,
        max_tokens=args.max_tokens_per_gpu * args.context_parallel_size,
        oversize_strategy=args.sft_oversize_strategy,
        whole_render=objective.head == "scalar",
        reads=tuple(objective.reads),
        prompt_key=args.prompt_key,
        chosen_key=args.chosen_key,
        rejected_key=args.rejected_key,
        pair_id_key=args.pair_id_key,
        conversation_key_map=args.conversation_key_map,
        tool_key=args.tool_key,
        system_prompt=args.system_prompt,
        chat_template=args.chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs,
        strict=args.strict_data,
    )


def packing(args: argparse.Namespace, *, dp_size: int, hidden_size: int) -> Packing:
    """The token budget is per context-parallel rank; attention is priced for this model's width."""
    return Packing(
        dp_size=dp_size,
        max_tokens=args.max_tokens_per_gpu * args.context_parallel_size,
        share_prompt=args.share_prompt,
        microbatch_multiple=args.pipeline_model_parallel_size if args.num_layers_per_virtual_pipeline_stage else 1,
        area_cost=1 / (6 * hidden_size),
        row_multiple=parallel_config(args).row_multiple,
    )


def optimizer_options(args: argparse.Namespace, total_steps: int) -> OptimizerOptions:
    warmup = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * total_steps)
    if warmup >= total_steps:
        raise UserError(f"--lr-warmup-iters {warmup} must be below the run's {total_steps} steps")
    return OptimizerOptions(
        lr=args.lr,
        min_lr=args.min_lr,
        decay_style=args.lr_decay_style,
        warmup_steps=warmup,
        total_steps=total_steps,
        weight_decay=args.weight_decay,
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        eps=args.adam_eps,
        clip_grad=args.clip_grad,
        distributed=args.use_distributed_optimizer,
        overlap=args.overlap_grad_reduce,
    )


def recompute_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
    }


def router_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"moe_aux_loss_coeff": args.moe_aux_loss_coeff} if args.moe_aux_loss_coeff else {}


def total_steps(args: argparse.Namespace, train_set: Batches | None) -> int:
    """Optimizer steps of the whole run; 0 without training."""
    if train_set is None or args.skip_train:
        return 0
    return args.num_rollout or args.num_epoch * train_set.steps_per_epoch


def check_model(args: argparse.Namespace, config: HFConfig) -> None:
    """Refuse what this model would not compute as its authors do."""
    window = attention_window(config)
    if window is not None and args.preference_max_length > window:
        raise UserError(
            f"--preference-max-length {args.preference_max_length}: {args.hf_checkpoint} attends to the last {window} tokens "
            "only, and relax computes full attention; use at most that"
        )
    if args.preference_max_length > config.max_position_embeddings:
        raise UserError(
            f"--preference-max-length {args.preference_max_length}: {args.hf_checkpoint} has positions for "
            f"{config.max_position_embeddings} tokens; use at most that"
        )


def check_vocabulary(dataset: GroupDataset, args: argparse.Namespace, config: HFConfig) -> None:
    """Token ids must be rows of the model's embedding."""
    if dataset.max_token_id >= config.vocab_size:
        raise UserError(
            f"--hf-checkpoint {args.hf_checkpoint}: the data hold token id {dataset.max_token_id}, but the model has a "
            f"vocabulary of {config.vocab_size}; tokenizer, or tokenized data, and model do not belong together"
        )
