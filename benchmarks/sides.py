"""The two sides of vs_trl.py, each a worker's function: relax's own `Run`, and TRL's trainer fed with relax's token ids.

Invariants: both take the same pairs, as the same token ids, in the same order; both start from the same weights, reward head
included; both use AdamW, a constant learning rate and one clipping norm. Each replies once when it is ready and once per
step. A step is timed from the turn to the reply: data, forward, backward, clipping, optimizer, and the log of the step.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker import Seconds, Turns, peak_rss_gib

LEARNING_RATE = {"dpo": 1e-6, "rm": 1e-5}
BETA1, BETA2, EPSILON, CLIP, DPO_BETA, SEED = 0.9, 0.999, 1e-8, 1.0, 0.1, 42
ANY_RATE = "1"  # TFLOP/s: the benchmark measures the machine itself


@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides are told. steps counts those to warm up; max_tokens is relax's micro-batch budget; scratch is shared."""

    objective: str
    dtype: str
    model: Path
    pairs: Path
    scratch: Path
    pairs_per_step: int
    steps: int
    max_length: int
    max_completion_length: int
    max_tokens: int
    threads: int

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATE[self.objective]

    @property
    def exchange(self) -> Path:
        """Where relax leaves the pairs and the reward head for TRL."""
        return self.scratch / "pairs.pickle"


@dataclass(frozen=True, slots=True)
class Turn:
    """One step. reference: scoring the step's pairs with a reference, apart from the step; tokens: of both sequences of each
    pair, never padded; flops: those that the objective needs, as relax lays the pairs out (relax/metrics.py)."""

    loss: float
    step: Seconds
    peak_rss_gib: float
    reference: Seconds | None = None
    tokens: int = 0
    flops: float = 0.0


def run_relax(turns: Turns, settings: Settings) -> None:
    """`python -m relax.train` step by step. After each DPO step it scores the same pairs as a reference pass does."""
    import torch

    torch.set_num_threads(settings.threads)
    from relax.cli.arguments import parse_args
    from relax.training.run import Run

    run = Run(parse_args(_relax_flags(settings)))
    dataset = run.train_set.dataset
    needed = settings.steps * settings.pairs_per_step
    if len(dataset) < needed:
        from relax.errors import UserError

        raise UserError(
            f"--pairs {settings.pairs}: {settings.steps} steps of {settings.pairs_per_step} pairs need "
            f"{needed} pairs, and {len(dataset)} are usable; lower --steps or --pairs-per-step"
        )
    head = run.engine.chunks[0].score.weight.detach().float().tolist() if settings.objective == "rm" else None
    rows = [dataset[i] for i in range(needed)]
    margins = dataset.columns["margin"].tolist() if "margin" in dataset.columns else [0.0] * needed
    ids = [(row.prompt.tolist(), *(ids.tolist() for ids in row.completions), margins[i]) for i, row in enumerate(rows)]
    settings.exchange.write_bytes(pickle.dumps({"pairs": ids, "head": head, "margins": "margin" in dataset.columns}))
    turns.reply(run.engine.num_parameters)
    for step in range(1, settings.steps + 1):
        turns.wait()
        start = Seconds.now()
        metrics = run.train_step(step)
        run.log(step, metrics)
        seconds = start.until_now()
        _, indices = run.train_set.indices(step)
        reference = None
        if run.objective.needs_reference:
            start = Seconds.now()
            run.engine.score(run.train_set.batch(indices, with_reference=False))
            reference = start.until_now()
        turns.reply(
            Turn(
                loss=metrics[f"train/{settings.objective}/loss"],
                step=seconds,
                reference=reference,
                tokens=int((dataset.lengths[indices] @ [2, 1, 1]).sum()),
                flops=metrics["perf/tflops_per_gpu"] * metrics["perf/step_time_s"] * 1e12,
                peak_rss_gib=peak_rss_gib(),
            )
        )


def _relax_flags(settings: Settings) -> list[str]:
    flags: dict[str, Any] = {
        "--loss-type": settings.objective,
        "--hf-checkpoint": settings.model,
        "--prompt-data": settings.pairs,
        "--device": "cpu",
        "--num-rollout": settings.steps,
        "--global-batch-size": settings.pairs_per_step,
        "--preference-max-length": settings.max_length,
        "--preference-max-completion-length": settings.max_completion_length,
        "--max-tokens-per-gpu": settings.max_tokens,
        "--lr": settings.learning_rate,
        "--lr-decay-style": "constant",
        "--adam-beta1": BETA1,
        "--adam-beta2": BETA2,
        "--adam-eps": EPSILON,
        "--weight-decay": 0,
        "--clip-grad": CLIP,
        "--seed": SEED,
        "--num-workers": 1,
        "--data-cache-dir": settings.scratch / "cache",
        "--log-dir": settings.scratch / "log",
        "--peak-tflops": ANY_RATE,
    }
    if settings.objective == "dpo":
        flags["--dpo-beta"] = DPO_BETA
    switches = ["--no-shuffle", "--bf16" if settings.dtype == "bf16" else "--no-bf16"]
    return [str(word) for pair in flags.items() for word in pair] + switches


def run_trl(turns: Turns, settings: Settings) -> None:
    """TRL's DPOTrainer or RewardTrainer with its defaults: padded batches and, for DPO, a reference forward every step."""
    import torch

    torch.set_num_threads(settings.threads)
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    exchange = pickle.loads(settings.exchange.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    last = {answer[-1] for pair in exchange["pairs"] for answer in pair[1:3]}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in last:
        # A reward model finds a sequence's end by looking for padding: the last token must not be the padding token.
        words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        tokenizer.pad_token = next(word for word, token in words if token not in last)
    losses: list[float] = []

    class Gate(TrainerCallback):
        """Holds the trainer between its steps."""

        start = Seconds.now()

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()
            self.start = Seconds.now()

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            turns.reply(Turn(loss=losses[-1], step=self.start.until_now(), peak_rss_gib=peak_rss_gib()))
            if state.global_step < settings.steps:
                turns.wait()
            self.start = Seconds.now()

    build = _dpo_trainer if settings.objective == "dpo" else _reward_trainer
    rows = Dataset.from_list(_columns(exchange, settings.objective))
    trainer = build(settings, exchange["head"], train_dataset=rows, processing_class=tokenizer, callbacks=[Gate()])
    training_step = trainer.training_step

    def noting_loss(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    trainer.training_step = noting_loss
    turns.reply(sum(p.numel() for p in trainer.model.parameters()))
    trainer.train()


def _columns(exchange: dict[str, Any], objective: str) -> list[dict[str, Any]]:
    """Rows as TRL's collators read them once tokenized; its `margin` column means the same as ours."""
    if objective == "dpo":
        return [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r, _ in exchange["pairs"]]
    margins = exchange["margins"]
    return [
        {"chosen_ids": p + c, "rejected_ids": p + r, **({"margin": margin} if margins else {})}
        for p, c, r, margin in exchange["pairs"]
    ]


def _trainer_arguments(settings: Settings) -> dict[str, Any]:
    return {
        "output_dir": str(settings.scratch / "trl"),
        "per_device_train_batch_size": settings.pairs_per_step,
        "max_steps": settings.steps,
        "max_length": settings.max_length,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_epsilon": EPSILON,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,  # its default trades time for memory
        "bf16": False,  # the weights have the dtype; no autocast
        "fp16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": SEED,
    }


def _dtype(settings: Settings) -> Any:
    import torch

    return torch.bfloat16 if settings.dtype == "bf16" else torch.float32


def _dpo_trainer(settings: Settings, head: None, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    class TokenizedDPOTrainer(DPOTrainer):
        """TRL's with rows that are tokenized already."""

        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(settings.model, dtype=_dtype(settings), local_files_only=True) for _ in range(2)
    )
    config = DPOConfig(**_trainer_arguments(settings), beta=DPO_BETA)
    return TokenizedDPOTrainer(model=policy, ref_model=reference, args=config, **options)


def _reward_trainer(settings: Settings, head: list[list[float]], **options: Any) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(
        settings.model, num_labels=1, dtype=_dtype(settings), local_files_only=True
    )
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor(head))
    return RewardTrainer(model=model, args=RewardConfig(**_trainer_arguments(settings)), **options)
