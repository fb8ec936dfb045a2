"""Weights: each invariant of relax/backend/weights/hugging_face.py, with exact values against stock transformers."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.backend.model.families import read_hf_config
from relax.backend.model.preference_model import PreferenceModel
from relax.backend.weights.hugging_face import check_finite, hf_tensors, load_hf_weights, weight_hashes
from relax.errors import UserError
from tests.models import FAMILIES, load, random_pairs, save_tiny, scores, stock_logps


def tensors_of(model: PreferenceModel, directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in hf_tensors([model], read_hf_config(directory)) if tensor is not None}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_stock_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    stock = save_tiny(tmp_path, family, tie_word_embeddings=tied)
    pairs = random_pairs()
    torch.testing.assert_close(scores(load(tmp_path), pairs).double(), stock_logps(stock, pairs), rtol=2e-5, atol=0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_equal_stock_transformers(tmp_path: Path, family: str) -> None:
    """A directory saved from AutoModelForSequenceClassification: `model.*` and `score.weight`."""
    stock = save_tiny(tmp_path, family, head="scalar", num_labels=1)
    pairs = random_pairs()
    ours = scores(load(tmp_path, head="scalar"), pairs)
    sequences = [np.concatenate((pair.prompt, side)) for pair in pairs for side in (pair.chosen, pair.rejected)]
    with torch.no_grad():
        theirs = torch.cat([stock(torch.tensor(ids, dtype=torch.int64)[None]).logits[0] for ids in sequences])
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("shard_size", ["1GB", "50KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_exact(tmp_path: Path, family: str, shard_size: str, head: str) -> None:
    save_tiny(tmp_path, family, head=head, dtype=torch.bfloat16, shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    stored = stored_tensors(tmp_path)
    found = tensors_of(load(tmp_path, head=head, dtype=torch.bfloat16), tmp_path)
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, stored[name]), name


@pytest.mark.usefixtures("on_cpu")
def test_names_come_in_the_order_of_the_layers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", num_hidden_layers=1)
    layer = "model.layers.0."
    assert list(tensors_of(load(tmp_path), tmp_path)) == [
        "model.embed_tokens.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}self_attn.o_proj.weight",
        *(f"{layer}self_attn.{x}_proj.weight" for x in "qkv"),
        *(f"{layer}self_attn.{x}_proj.bias" for x in "qkv"),
        f"{layer}post_attention_layernorm.weight",
        f"{layer}mlp.gate_proj.weight",
        f"{layer}mlp.up_proj.weight",
        f"{layer}mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.usefixtures("on_cpu")
def test_weights_convert_to_the_model_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    for name, tensor in tensors_of(load(tmp_path, dtype=torch.bfloat16), tmp_path).items():
        assert torch.equal(tensor, stored_tensors(tmp_path)[name].bfloat16()), name


@pytest.mark.usefixtures("on_cpu")
def test_a_tied_checkpoint_may_repeat_its_embeddings_but_not_contradict_them(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    stored = stored_tensors(tmp_path)
    assert "lm_head.weight" not in stored
    alone = weight_hashes([load(tmp_path)], read_hf_config(tmp_path))
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    assert weight_hashes([load(tmp_path)], read_hf_config(tmp_path)) == alone
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    load(tmp_path, head="scalar")  # a reward model has no output layer to tie
    with pytest.raises(UserError, match="ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight"):
        load(tmp_path)


@pytest.mark.usefixtures("on_cpu")
def test_a_reward_head_is_drawn_from_the_seed_where_there_is_none(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", initializer_range=0.05)
    first, again, other = (load(tmp_path, head="scalar", seed=seed).score.weight for seed in (3, 3, 4))
    expected = torch.empty(1, 48).normal_(0.0, 0.05, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, expected) and torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.usefixtures("on_cpu")
def test_hashes_are_sha256_of_the_bytes_under_hugging_face_names(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", dtype=torch.bfloat16)
    expected = {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(stored_tensors(tmp_path).items())
    }
    total = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in expected.items()).encode()).hexdigest()
    hashes = weight_hashes([load(tmp_path, dtype=torch.bfloat16)], read_hf_config(tmp_path))
    assert hashes == {"sha256": total, "dtype": "bfloat16", "tensors": expected}


@pytest.mark.usefixtures("on_cpu")
def test_the_rotary_table_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**stored_tensors(tmp_path), **table}, tmp_path / "model.safetensors")
    load(tmp_path)


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def drop_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


def add_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(48)


def transpose_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].t().contiguous()


def quantize_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(48, dtype=torch.int8)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_one, "missing: model.norm.weight"),
        (
            drop_a_layer,
            "missing: model.layers.1.input_layernorm.weight, model.layers.1.self_attn.o_proj.weight, "
            "model.layers.1.self_attn.q_proj.weight and 8 more",
        ),
        (add_one, "unexpected: model.layers.2.input_layernorm.weight"),
        (transpose_one, "wrong shape: lm_head.weight [48, 272] (the config says [272, 48])"),
        (quantize_one, "not floating point (quantized? save it dequantized): model.norm.weight I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Any, message: str) -> None:
    save_tiny(tmp_path, "qwen3")
    tensors = stored_tensors(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"{tmp_path}: the weights do not fit its config.json; {message}"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, family: str) -> None:
    """One value of each tensor in turn, experts and stacked ones too."""
    save_tiny(tmp_path, family)
    config, model = read_hf_config(tmp_path), load(tmp_path)
    check_finite([model], config, where="here")
    whole = stored_tensors(tmp_path)
    for number, (name, tensor) in enumerate(whole.items()):
        values = tensor.clone()
        values.view(-1)[number % values.numel()] = (torch.nan, torch.inf, -torch.inf)[number % 3]
        save_file({**whole, name: values}, tmp_path / "model.safetensors")
        load_hf_weights([model], tmp_path, config, seed=0)
        with pytest.raises(UserError, match=f"^here: {name} holds values that are NaN or infinite"):
            check_finite([model], config, where="here")


@pytest.mark.usefixtures("on_cpu")
def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", head="scalar")
    save_file({**stored_tensors(tmp_path), "score.weight": torch.zeros(3, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"wrong shape: score.weight \[3, 48\] \(the config says \[1, 48\]\)"):
        load(tmp_path, head="scalar")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: (d / "model.safetensors").unlink(),
            "no model.safetensors and no model.safetensors.index.json there",
        ),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "only pickled weights (.bin)"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 4), "model.safetensors: unreadable or cut short"),
        (lambda d: cut(d / "model.safetensors"), "model.safetensors: unreadable or cut short"),
    ],
    ids=["absent", "pickled", "garbage", "cut"],
)
def test_unreadable_weights_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    save_tiny(tmp_path, "qwen3")
    spoil(tmp_path)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda index: index.write_text("{"), "model.safetensors.index.json: not a safetensors index"),
        (lambda index: index.write_text("[]"), "model.safetensors.index.json: not a safetensors index"),
        (lambda index: shards(index)[1].unlink(), "named in the index but absent"),
        (lambda index: cut(shards(index)[1]), "unreadable or cut short"),
    ],
    ids=["torn", "no map", "absent shard", "cut shard"],
)
def test_broken_shards_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    save_tiny(tmp_path, "qwen3", shard_size="50KB")
    spoil(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


def cut(path: Path) -> None:
    """Half a file, as an interrupted copy leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shards(index: Path) -> list[Path]:
    return sorted(index.parent.glob("model-*.safetensors"))


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in directory.glob("model*.safetensors") for name, t in load_file(file).items()}
