"""Where weights come from and what must agree before they are used.

The policy starts from the complete checkpoint in `--load`, else from `--ref-load` of either kind, else from
`--hf-checkpoint`. The frozen reference is identified by the SHA-256 of its weights in Hugging Face naming: the same for every
layout and file format, recorded in each checkpoint, and required to be the same when a run resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from relax.backend.checkpoint.loading import CheckpointInfo, find_checkpoint, load_checkpoint
from relax.backend.checkpoint.state import load_model_state, load_training_state, model_state, training_state
from relax.backend.engine import Engine
from relax.backend.model.families import HFConfig
from relax.backend.weights.hugging_face import check_finite, initialize_score, load_hf_weights, weight_hashes
from relax.backend.weights.tensor_files import TensorFiles
from relax.backend.weights.weight_table import SCORE
from relax.errors import UserError
from relax.objectives.base import Head


@dataclass(frozen=True)
class WeightSource:
    """A Hugging Face directory, or a Megatron checkpoint at a step (None: the latest complete one when it is first asked for),
    by the flag that names it."""

    path: Path
    step: int | None = None
    flag: str = "--ref-load"

    def check(self) -> None:
        """Refuse Hugging Face weights that cannot be read, from their headers alone: before the data take their time."""
        if self.is_hugging_face:
            TensorFiles(self.path)

    @property
    def is_hugging_face(self) -> bool:
        return (self.path / "config.json").is_file()

    @cached_property
    def checkpoint(self) -> CheckpointInfo:
        return find_weights(self.path, step=self.step, flag=self.flag)

    def load(self, engine: Engine, *, seed: int) -> None:
        """Fill the model. A reward model's head comes along, or is initialised from the seed where a base model has none."""
        if self.is_hugging_face:
            load_hf_weights(engine.chunks, self.path, engine.hf_config, seed=seed)
            check_finite(engine.chunks, engine.hf_config, where=str(self.path))
            return
        load_weights(engine, self.checkpoint, seed=seed)

    def head(self) -> Head:
        """Which head the weights have, from their names alone; a language model's where nothing tells."""
        if self.is_hugging_face:
            return "scalar" if SCORE in TensorFiles(self.path) else "lm"
        return head_of(self.checkpoint)


def find_weights(directory: Path, *, step: int | None, flag: str) -> CheckpointInfo:
    """The checkpoint of `step`, or the latest, that must be there."""
    info = find_checkpoint(directory, step=step, flag=flag)
    if info is None:
        raise UserError(f"{flag} {directory}: no complete checkpoint there")
    return info


def head_of(info: CheckpointInfo) -> Head:
    """The head to build for a checkpoint's weights."""
    if info.head == "value":
        raise UserError(f"{info.where}: a PPO critic's checkpoint; give a language model's or a reward model's")
    return "scalar" if info.head == "scalar" else "lm"


def load_weights(engine: Engine, info: CheckpointInfo, *, seed: int) -> None:
    """Only the model's weights, from a Megatron checkpoint."""
    check_vocabulary_rows(engine.hf_config, info)
    head, state = engine.objective.head, model_state(engine)
    if info.head == "scalar" and head == "lm":
        raise UserError(f"{info.where}: a reward model's checkpoint; a policy needs one with an output layer")
    new_head = head == "scalar" and info.head != "scalar"
    if new_head:
        for chunk in state.values():
            chunk.pop("score.weight", None)
    load_model_state(engine, load_checkpoint(info, {"model": state})["model"], strict=not new_head)
    if new_head:
        initialize_score(engine.chunks, engine.hf_config, seed=seed)
    check_finite(engine.chunks, engine.hf_config, where=info.where)


def check_vocabulary_rows(config: HFConfig, info: CheckpointInfo) -> None:
    """Padding of the vocabulary may differ between layouts, but every real token needs its row."""
    if info.vocab_rows is not None and info.vocab_rows < config.vocab_size:
        raise UserError(
            f"{info.where}: its vocabulary has {info.vocab_rows} rows, but --hf-checkpoint has "
            f"{config.vocab_size} tokens; they do not belong together"
        )


def reference_identity(engine: Engine, source: WeightSource) -> dict[str, Any]:
    """Hashes of the weights that the model holds now, with where they came from."""
    return {"source": str(source.path), "step": source.step, **weight_hashes(engine.chunks, engine.hf_config)}


def check_reference(identity: dict[str, Any], info: CheckpointInfo) -> None:
    """Refuse to resume a run against another reference than the one it was trained with."""
    saved = info.reference
    if saved is None:
        raise UserError(
            f"--load {info.path}: no relax_dpo_reference.json there, so its reference is unknown; "
            "start a new run from its weights with --finetune, or resume with --dpo-reference-free if it was trained so"
        )
    sha256 = saved.get("sha256", "none")
    if sha256 != identity["sha256"]:
        tensors = identity["tensors"]
        changed = [name for name, digest in tensors.items() if saved.get("tensors", {}).get(name) != digest]
        raise UserError(
            f"--load {info.path} was trained against the reference {saved.get('source', '?')} (sha256 {sha256[:16]}), but "
            f"--ref-load gives {identity['source']} (sha256 {identity['sha256'][:16]}): different weights in {len(changed)} of "
            f"{len(tensors)} tensors, first {changed[0] if changed else '(other names)'}; give the same reference, or "
            "--finetune for a new run"
        )


def check_objective(info: CheckpointInfo, *, loss_type: str, head: str) -> None:
    """Refuse a checkpoint of another objective."""
    saved = info.run.get("loss_type")
    found = {"lm": "a language model", "scalar": "a reward model"}.get(info.head or "", f"head {info.head!r}")
    known = info.head or ("lm" if not info.run else None)  # made elsewhere, with its embedding as output layer
    if (saved is not None and saved != loss_type) or known != head:
        raise UserError(
            f"--load {info.path} holds {found}{f' trained with --loss-type {saved}' if saved else ''}, but this run has "
            f"--loss-type {loss_type}; give another --load, or the matching --loss-type"
        )


def check_same_run(info: CheckpointInfo, flags: dict[str, Any], *, needs_reference: bool) -> None:
    """Refuse to resume with flags under which the order of pairs, the weights or the objective could not continue."""
    saved = info.run.get("arguments", {})
    for name, flag in CONTINUED.items():
        if name in saved and saved[name] != flags[name]:
            raise UserError(
                f"--load {info.path} was trained with {name.replace('_', ' ')} {saved[name]}, but this run has {flags[name]}: "
                f"it could not continue; give the same {flag}, or --finetune for a new run"
            )
    if info.reference is not None and not needs_reference:
        raise UserError(
            f"--load {info.path} was trained against a reference, but this run has none; leave out --dpo-reference-free, or "
            "give --finetune for a new run"
        )


def recorded_text(info: CheckpointInfo, name: str) -> str | None:
    """A text in the checkpoint's record of its run; None where it has none. UserError for anything else."""
    text = info.run.get(name)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{info.path}: relax_run.json has {name} {text!r:.80}, which is no text: the record is damaged")
    return text


def recorded_date(info: CheckpointInfo) -> date | None:
    """The day that the run's chat template reads from the clock. UserError for what is none."""
    text = recorded_text(info, "template_date")
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise UserError(f"{info.path}: relax_run.json has template_date {text!r:.80}, which is no day: it is damaged") from None


def check_data(info: CheckpointInfo, *, fingerprint: str) -> None:
    """Refuse to resume over other data."""
    data = info.run.get("data_fingerprint")
    if data is not None and data != fingerprint:
        raise UserError(
            f"--load {info.path} was trained on data {data[:16]} ({info.run.get('num_pairs')} pairs), but --prompt-data gives "
            f"{fingerprint[:16]}: the order of pairs would not continue; give the same data and limits, or --finetune"
        )


CONTINUED = {
    "global_batch_size": "--global-batch-size",
    "seed": "--seed",
    "shuffle": "--no-shuffle",
    "bf16": "--bf16",
    "dpo_loss": "--dpo-loss",
    "dpo_f_divergence": "--dpo-f-divergence",
}
TOLD = (
    "max_tokens_per_gpu",
    "share_prompt",
    "attention_backend",
    "clip_grad",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "moe_aux_loss_coeff",
)


def changed_flags(info: CheckpointInfo, flags: dict[str, Any], *, loss_type: str) -> list[str]:
    """Flags that decide the numbers and are not what they were, as "--seed 42 -> 43"; the schedule's are told elsewhere.

    A resumed run takes the flags as they are: it continues, but is not the run that it would have been.
    """
    saved = info.run.get("arguments", {})
    names = [name for name in flags if name in TOLD or name.startswith(f"{loss_type}_")]
    return [
        f"--{name.replace('_', '-')} {saved[name]} -> {flags[name]}"
        for name in names
        if name in saved and saved[name] != flags[name]
    ]


def resume(engine: Engine, info: CheckpointInfo, *, optimizer: bool, rng: bool, say: Callable[[str], None]) -> None:
    """Restore a training run from its checkpoint."""
    for wanted, present, what, flag in (
        (optimizer, info.has_optimizer, "optimizer state", "--no-load-optim"),
        (rng, info.has_rng, "random number states", "--no-load-rng"),
    ):
        if wanted and not present:
            raise UserError(f"--load {info.path} has no {what}; resume without it by {flag}, or start anew with --finetune")
    check_vocabulary_rows(engine.hf_config, info)
    kept = info.run.get("objective_state", {})
    engine.objective_state = {name: kept.get(name, value) for name, value in engine.objective.initial_state.items()}
    distributed = info.run.get("arguments", {}).get("use_distributed_optimizer")
    state = training_state(engine, step=info.step, optimizer=optimizer, rng=rng, loading=True, distributed=distributed)
    for change in load_training_state(engine, load_checkpoint(info, state)):
        say(f"the schedule changed: {change}")
