"""A policy that is its reference gives ln 2, and the reference's log-probs, bit for bit: whatever the family, the batch, the
budget, the precision and the options. `tests/distributed` holds the same under every layout.

Matrix products change with the number of their rows (`products.LARGE`), so batches are small and large; the reference is
scored as a run scores it, before the optimizer moves gradients, and with it perhaps weights, to other memory.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.backend.ops.cpu import attention, kernels, products
from tests.engines import STANDING, UNMOVED, make_engine, start_batch, values_at_start, with_reference
from tests.models import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_process")

BATCHES = ((1, 8192, True), (8, 900, False), (16, 8192, False), (32, 8192, True), (61, 8192, True), (64, 900, True))
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "moe_aux_loss_coeff": 0.3}


@dataclass(frozen=True)
class Variant:
    """compiled: the elementwise work; instructions: whether the CPU has those for bf16, None: as it is."""

    overrides: dict[str, Any] = field(default_factory=dict)
    distributed: bool = False
    compiled: bool = True
    instructions: bool | None = None
    batches: tuple[tuple[int, int, bool], ...] = BATCHES  # pairs, tokens of a micro-batch, whether prompts are shared


VARIANTS = {
    "plain": Variant(),
    "full recompute, distributed, torch's operations": Variant(
        FULL, distributed=True, compiled=False, batches=((2, 60, True), (61, 8192, True))
    ),
    "selective recompute, no bf16 instructions": Variant(
        {"recompute_granularity": "selective"}, instructions=False, batches=((5, 8192, False), (64, 8192, False))
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    save_tiny(root, request.param, tie_word_embeddings=request.param in ("qwen2", "qwen3"))
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_starts_at_its_reference(
    directory: Path, dtype: torch.dtype, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = VARIANTS[variant]
    if not options.compiled:
        monkeypatch.setattr(kernels, "library", lambda: "there is none in this test")
    if options.instructions is not None:
        for module in (products, attention):
            monkeypatch.setattr(module, "cpu_multiplies_bf16", lambda: options.instructions)
    reference = make_engine(directory, "dpo", dtype=dtype, options=None, **options.overrides)
    steps = replace(STANDING, distributed=options.distributed, overlap=options.distributed)
    policy = make_engine(directory, "dpo", dtype=dtype, options=steps, **options.overrides)
    for seed, (count, max_tokens, share) in enumerate(options.batches):
        batch = start_batch(policy, count=count, max_tokens=max_tokens, share_prompt=share, seed=seed)
        batch = with_reference(reference, batch)
        assert len(np.unique(batch.references)) == 2 * count
        assert values_at_start(policy, batch) == UNMOVED, (count, max_tokens, share)


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_start_at_whole_cache_lines(directory: Path, distributed: bool) -> None:
    """Small products give other bits where memory is aligned to less than 16 bytes: no buffer may shift the weights."""
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(directory, "dpo", dtype=dtype, options=replace(STANDING, distributed=distributed))
        weights = [p for chunk in engine.chunks for p in chunk.parameters()]
        assert [p.data_ptr() % 64 for p in weights] == [0] * len(weights)
