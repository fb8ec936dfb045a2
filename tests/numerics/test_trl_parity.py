"""Ten steps beside TRL's trainers on the same weights and token ids: the same losses.

TRL tokenizes in its own way (it trains the template's trailing newline and truncates differently), so it gets our ids.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import numpy as np
import pytest
import torch
import transformers
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from relax.objectives import CPO, DPO, ORPO, AlphaPO, Objective, RewardModel, Scores, SimPO
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


def our_losses(directory: Path, objective: Objective, margins: np.ndarray | None = None) -> list[float]:
    """The losses of ten steps over the pairs in turn."""
    engine = make_engine(directory, objective, options=TRAINING)
    pairs, steps = training_pairs(), []
    for i in range(0, len(pairs), PAIRS):
        batch = make_batch(pairs[i : i + PAIRS], margins=None if margins is None else margins[i : i + PAIRS])
        steps.append(with_reference(engine, batch) if objective.needs_reference else batch)
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
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    assert ours[-1] < 0.97 * ours[0]  # it did train


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


def trls_dpo_losses(directory: Path, output: Path, **objective: Any) -> list[float]:
    rows = [
        {"prompt_ids": p.prompt.tolist(), "chosen_ids": p.chosen.tolist(), "rejected_ids": p.rejected.tolist()}
        for p in training_pairs()
    ]
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) for _ in range(2))
    trainer = RecordedDPO(
        model=model,
        ref_model=reference,
        args=DPOConfig(**{"beta": 0.1, **objective}, **settings(output)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer_of(directory),
    )
    trainer.train()
    return trainer.losses


def test_dpo_loses_as_trl_does(policy: Path, tmp_path: Path) -> None:
    ours = our_losses(policy, DPO())
    assert ours[0] == 0.6931471805599453 and ours[-1] < 0.6
    assert_equal_curves(ours, trls_dpo_losses(policy, tmp_path, loss_type=["sigmoid"]))


SHARED: dict[str, tuple[DPO, dict[str, Any]]] = {  # TRL's name -> ours, and what TRL is told besides
    "hinge": (DPO(loss="hinge"), {}),
    "ipo": (DPO(loss="ipo_mean"), {}),
    "exo_pair": (DPO(loss="exo", label_smoothing=0.1), {"label_smoothing": 0.1}),
    "nca_pair": (DPO(loss="nca", beta=0.1), {}),
    "robust": (DPO(loss="robust"), {"label_smoothing": 0.1}),
    "bco_pair": (DPO(loss="bco", beta=0.1), {}),
    "sppo_hard": (DPO(loss="sppo_hard", beta=0.1), {}),
    "aot": (DPO(loss="aot", beta=0.1), {}),
    "aot_unpaired": (DPO(loss="aot_unpaired", beta=0.1), {}),
    "apo_zero": (DPO(loss="apo_zero"), {}),
    "apo_down": (DPO(loss="apo_down"), {}),
    "discopop": (DPO(loss="discopop"), {"beta": 0.05}),
    "sigmoid_norm": (DPO(loss="sigmoid_norm"), {"beta": 5.0}),
    "forward_kl": (DPO(f_divergence="forward_kl"), {"loss_type": ["sigmoid"], "f_divergence_type": "forward_kl"}),
    "js": (DPO(f_divergence="js"), {"loss_type": ["sigmoid"], "f_divergence_type": "js_divergence"}),
    "alpha": (DPO(f_divergence="alpha"), {"loss_type": ["sigmoid"], "f_divergence_type": "alpha_divergence"}),
    "ld_alpha": (DPO(ld_alpha=0.5), {"loss_type": ["sigmoid"], "ld_alpha": 0.5}),
    "a mix": (
        DPO(loss="sigmoid:0.8,bco:0.2,hinge:0.5", beta=0.1),
        {"loss_type": ["sigmoid", "bco_pair", "hinge"], "loss_weights": [0.8, 0.2, 0.5]},
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_every_shared_loss_goes_as_trls_does(policy: Path, tmp_path: Path, name: str) -> None:
    objective, told = SHARED[name]
    assert_equal_curves(our_losses(policy, objective), trls_dpo_losses(policy, tmp_path, **{"loss_type": [name], **told}))


def test_where_trl_means_something_else(policy: Path, tmp_path: Path) -> None:
    """Its cross-entropy term is a mean over the batch's tokens, ours over the pairs of each one's mean; it ignores smoothing in
    `sigmoid`, where we refuse it and have cdpo."""
    pairs = training_pairs()[:PAIRS]
    ours = our_losses(policy, DPO(loss="sigmoid,nll"))[0]
    theirs = trls_dpo_losses(policy, tmp_path, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0])[0]
    engine = make_engine(policy, DPO(), options=None)
    sums = engine.score(make_batch(pairs))[:, 0]
    tokens = np.array([len(pair.chosen) for pair in pairs])
    assert ours == pytest.approx(np.log(2) - (sums / tokens).mean(), rel=1e-6)
    assert theirs == pytest.approx(np.log(2) - sums.sum() / tokens.sum(), rel=1e-5)
    smoothed = trls_dpo_losses(policy, tmp_path, loss_type=["sigmoid"], label_smoothing=0.1)
    assert smoothed == trls_dpo_losses(policy, tmp_path, loss_type=["sigmoid"])


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
    assert_equal_curves(our_losses(reward_model, RewardModel(), margins), trainer.losses)


def trls_own(trainer: type, method: str, chosen: torch.Tensor, rejected: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The losses that a method of a TRL trainer gives for log-probs, each [num_pairs]."""
    told = {"beta": 0.1, "alpha": 0.0, "label_smoothing": 0.0, "accelerator": SimpleNamespace(device=torch.device("cpu"))}
    return getattr(trainer, method)(SimpleNamespace(**{**told, **settings}), chosen, rejected)[0]


def test_losses_without_a_reference_are_trls() -> None:
    """SimPO and AlphaPO on log-probs per token, CPO on their sums; TRL gives ORPO's odds term alone, with its sign."""
    lengths = torch.tensor([5.0, 10.0, 20.0, 4.0, 7.0, 7.0], dtype=torch.float64)
    sums = torch.tensor([-10.0, -20.0, -30.0, -12.0, -0.5, -21.0], dtype=torch.float64)
    scores = Scores(sums, lengths, torch.arange(3).repeat_interleave(2))
    total, mean = scores.pairs(sums), scores.pairs(sums / lengths)
    for ours, theirs in (
        (SimPO(beta=2.0, gamma=0.7), trls_own(CPOTrainer, "cpo_loss", *mean, loss_type="simpo", beta=2.0, simpo_gamma=0.7)),
        (
            AlphaPO(beta=2.0, gamma=0.7, alpha=0.25),
            trls_own(CPOTrainer, "cpo_loss", *mean, loss_type="simpo", beta=2.0, simpo_gamma=0.7, alpha=0.25),
        ),
        (CPO(nll_weight=0.0), trls_own(CPOTrainer, "cpo_loss", *total, loss_type="sigmoid")),
        (ORPO(weight=0.1), -mean[0] - trls_own(ORPOTrainer, "odds_ratio_loss", *mean)),
    ):
        np.testing.assert_allclose(ours(scores)[0], theirs, rtol=1e-6)
