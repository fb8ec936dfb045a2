"""Ten steps beside TRL's trainers on the same weights and token ids: the same losses.

TRL tokenizes in its own way (it trains the template's trailing newline and truncates differently), so it gets our ids.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import pytest
import torch
import transformers
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from tests.engines import OPTIONS, make_batch, make_engine, make_pairs, with_reference
from tests.models import TokenPair, save_tiny

pytestmark = pytest.mark.usefixtures("one_process")

STEPS, PAIRS = 10, 4
END, PAD = 256, 257
TRAINING = replace(OPTIONS, lr=1e-3, weight_decay=0.01, beta2=0.999, clip_grad=1.0, total_steps=STEPS)
FAMILIES = {"qwen3": {"tie_word_embeddings": True}, "llama": {}}


def training_pairs() -> list[TokenPair]:
    """Two steps' pairs of mixed lengths, each answer ending with the end id; no id is the padding's."""
    sizes = [(9, 6, 11), (4, 12, 3), (15, 2, 2), (7, 8, 8), (3, 5, 14), (11, 1, 6), (6, 9, 4), (20, 7, 5)]
    pairs = make_pairs(sizes, below=END)
    for pair in pairs:
        pair.chosen[-1] = pair.rejected[-1] = END
    return pairs


def our_losses(directory: Path, loss: str, margins: np.ndarray | None = None) -> list[float]:
    """The losses of ten steps over the pairs in turn."""
    engine = make_engine(directory, loss, options=TRAINING)
    pairs, steps = training_pairs(), []
    for i in range(0, len(pairs), PAIRS):
        batch = make_batch(pairs[i : i + PAIRS], margins=None if margins is None else margins[i : i + PAIRS])
        steps.append(with_reference(engine, batch) if loss == "dpo" else batch)
    return [float(engine.train_step(steps[i % len(steps)]).values[:, 0].mean()) for i in range(STEPS)]


def settings(output: Path) -> dict[str, Any]:
    """What TRL and we are told alike."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": PAIRS,
        "max_steps": STEPS,
        "learning_rate": TRAINING.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": TRAINING.weight_decay,
        "adam_beta1": TRAINING.beta1,
        "adam_beta2": TRAINING.beta2,
        "adam_epsilon": TRAINING.eps,
        "max_grad_norm": TRAINING.clip_grad,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_drop_last": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 100,
    }


class Recorded:
    """Takes token ids as they are and keeps every step's loss in full precision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(float(loss.detach()))
        return loss


class RecordedDPO(Recorded, DPOTrainer): ...


class RecordedReward(Recorded, RewardTrainer): ...


def assert_equal_curves(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert ours[-1] < ours[0] - 0.1  # it did train


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny(directory, request.param, **FAMILIES[request.param])
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def reward_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny(directory, request.param, head="scalar", pad_token_id=PAD)
    return directory


def tokenizer_of(directory: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, PAD)
    return tokenizer


def test_dpo_loses_as_trl_does(policy: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt_ids": p.prompt.tolist(), "chosen_ids": p.chosen.tolist(), "rejected_ids": p.rejected.tolist()}
        for p in training_pairs()
    ]
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32) for _ in range(2))
    trainer = RecordedDPO(
        model=model,
        ref_model=reference,
        args=DPOConfig(beta=0.1, loss_type=["sigmoid"], **settings(tmp_path)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer_of(policy),
    )
    trainer.train()
    ours = our_losses(policy, "dpo")
    assert ours[0] == 0.6931471805599453 and ours[-1] < 0.6
    assert_equal_curves(ours, trainer.losses)


@pytest.mark.parametrize("with_margins", [False, True])
def test_reward_models_lose_as_trls_do(reward_model: Path, tmp_path: Path, with_margins: bool) -> None:
    pairs = training_pairs()
    margins = np.linspace(0, 1.4, len(pairs)).astype(np.float32) if with_margins else None
    rows = [
        {"chosen_ids": [*p.prompt.tolist(), *p.chosen.tolist()], "rejected_ids": [*p.prompt.tolist(), *p.rejected.tolist()]}
        for p in pairs
    ]
    if margins is not None:
        rows = [{**row, "margin": float(margin)} for row, margin in zip(rows, margins, strict=True)]
    trainer = RecordedReward(
        model=transformers.AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32),
        args=RewardConfig(**settings(tmp_path)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer_of(reward_model),
    )
    trainer.train()
    assert_equal_curves(our_losses(reward_model, "rm", margins), trainer.losses)
