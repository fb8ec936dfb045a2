"""The memory estimate against models that are built: parameters to the last one, bytes, and what a forward pass keeps."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers

from relax.backend.model.families import FAMILIES
from relax.backend.model.layout import build_layout
from relax.backend.model.preference_model import PreferenceModel, transformer_config
from relax.backend.parallel import ParallelConfig
from relax.training.memory import Recompute, layer_activations, stage_bytes, stage_parameters
from tests.models import ops_for, random_pairs, tiny_config

CPU = torch.device("cpu")
ONE = ParallelConfig()


def build(config: Any, head: Any = "lm") -> PreferenceModel:
    return PreferenceModel(transformer_config(config, dtype=torch.float32, ops=ops_for(torch.float32)), config, head=head)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("family", "head", "tied"), product(FAMILIES, ("lm", "scalar"), (True, False)))
def test_parameters_are_those_of_the_model(family: str, head: Any, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    model = build(config, head)
    assert stage_parameters(config, ONE, head=head, stage=0).total == sum(p.numel() for p in model.parameters())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_about_what_is_estimated(family: str) -> None:
    """Every tensor that autograd saves during one more layer's forward pass, weights aside, each once."""
    pairs = random_pairs(6)
    layout = build_layout(pairs, [False] * len(pairs), head="lm", device=CPU)
    kept = []
    for layers in (2, 3):
        config = tiny_config(family, num_hidden_layers=layers)
        model = build(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor, own: set[int] = own, saved: dict[int, Any] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scores = model(layout.ids[None], None, None, packed_seq_params=layout)
        kept.append(sum(storage.nbytes() for storage in saved.values()))
        del scores
    measured = (kept[1] - kept[0]) / 4 / layout.ids.numel()
    assert measured <= layer_activations(config, ONE) <= 1.5 * measured


def a3b() -> transformers.PretrainedConfig:
    """The shape of Qwen3-30B-A3B."""
    return transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )


LAYER = 2048 * (4096 + 2 * 512) + 4096 * 2048 + 2 * 2048 + 2 * 128 + 2048 * 128  # attention, norms, router
EXPERTS, VOCABULARY = 128 * 3 * 2048 * 768, 151936 * 2048


def test_experts_are_split_by_their_own_sizes() -> None:
    whole = stage_parameters(a3b(), ONE, head="lm", stage=0)
    assert (whole.shared, whole.experts) == (48 * LAYER + 2 * VOCABULARY + 2048, 48 * EXPERTS)
    assert whole.total == 30_532_122_624  # as the model's card counts them
    layout = ParallelConfig(tensor=2, pipeline=4, expert=8, expert_tensor=1, sequence=True)
    halved = 2048 * 2560 + 2048 * 2048 + 2 * 2048 + 2 * 128 + 2048 * 128
    for stage, outer in ((0, VOCABULARY // 2), (1, 0), (3, VOCABULARY // 2 + 2048)):
        held = stage_parameters(a3b(), layout, head="lm", stage=stage)
        assert (held.shared, held.experts) == (12 * halved + outer, 12 * EXPERTS // 8)
    together = ParallelConfig(tensor=2, expert=4, expert_tensor=2, sequence=True)
    assert stage_parameters(a3b(), together, head="lm", stage=0).experts == 48 * EXPERTS // 8


def bytes_of(layout: ParallelConfig, **changes: Any) -> dict[str, float]:
    options = {"world_size": 32, "bf16": True, "distributed_optimizer": True, "max_tokens": 1000, **changes}
    return stage_bytes(a3b(), layout, head="lm", **{"stage": 0, "recompute": Recompute(), **options})


def test_the_distributed_optimizer_splits_experts_over_fewer_ranks() -> None:
    """32 ranks: 8 hold the same of all but the experts, 2 the same experts."""
    layout = ParallelConfig(tensor=2, pipeline=2, expert=8, expert_tensor=1, sequence=True)
    held = stage_parameters(a3b(), layout, head="lm", stage=0)
    state = "master weights and Adam moments, fp32"
    found = bytes_of(layout)
    assert found["parameters"] == 2 * held.total and found["gradients, fp32"] == 4 * held.total
    assert found[state] == 12 * (held.shared / 8 + held.experts / 2)
    assert bytes_of(layout, distributed_optimizer=False)[state] == 12 * held.total
    assert bytes_of(layout, bf16=False, distributed_optimizer=False)[state] == 8 * held.total


def test_activations_follow_the_schedule() -> None:
    """1F1B's first stage holds a micro-batch per stage, the last one; interleaving adds to it; recomputing leaves inputs."""

    def kept(layout: ParallelConfig, **options: Any) -> float:
        return bytes_of(layout, **options)["activations"] / 2000  # values per token

    layer = layer_activations(a3b(), ParallelConfig(pipeline=4))
    assert kept(ONE) == 48 * layer
    assert [kept(ParallelConfig(pipeline=4), stage=stage) for stage in (0, 1, 3)] == [48 * layer, 36 * layer, 12 * layer]
    interleaved = ParallelConfig(pipeline=4, layers_per_virtual_stage=6)  # two chunks: 2 x 3 + 4 + 1 of them in flight
    assert kept(interleaved) == 11 * 6 * layer
    assert kept(ONE, recompute=Recompute("uniform", 1)) == 48 * 2048 + layer
    assert kept(ONE, recompute=Recompute("block", 12)) == 12 * 2048 + 36 * layer + layer
    assert kept(ParallelConfig(tensor=2, sequence=True)) == 24 * layer
