"""Objectives that weigh tokens: scores are weighted sums of stock log-probs under every packing, and step 0 is ln 2."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from relax.objectives import DPO
from relax.packing import plan_step
from tests.engines import SIZES, column, lengths_of, make_batch, make_engine, make_pairs, with_reference
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_tiny(directory, "qwen3")


@torch.no_grad()
def test_scores_are_weighted_sums(model: tuple[Path, object]) -> None:
    directory, stock = model
    objective, pairs = DPO(ld_alpha=0.25), make_pairs(SIZES)
    engine = make_engine(directory, objective, options=None)
    expected = []
    for pair in pairs:
        weights = objective.token_weights([len(completion) for completion in pair.completions])
        for completion, weight in zip(pair.completions, weights, strict=True):
            ids = torch.tensor(np.concatenate((pair.prompt, completion)), dtype=torch.int64)
            logprobs = stock(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            expected.append(float(logprobs[len(pair.prompt) - 1 :].numpy() @ weight))
    for share, max_tokens in ((True, 1000), (False, 40)):
        plan = plan_step(lengths_of(pairs), max_tokens=max_tokens, share_prompt=share)
        found = engine.score(make_batch(pairs, plan=plan))
        np.testing.assert_allclose(found.flatten(), expected, rtol=1e-5)


def test_a_policy_equal_to_its_reference_gives_ln_2(model: tuple[Path, object]) -> None:
    engine = make_engine(model[0], DPO(ld_alpha=0.5), dtype=torch.bfloat16)
    batch = with_reference(engine, make_batch(make_pairs(SIZES)))
    assert (column(engine, engine.train_step(batch).values, "loss") == math.log(2)).all()
