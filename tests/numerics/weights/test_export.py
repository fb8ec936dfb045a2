"""Export: stock transformers loads it and computes what our model computes; the rest of the directory is right."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from relax.backend.model.families import read_hf_config
from relax.backend.weights.export import LIST, _replacing, check_output, export_hf, padding_id
from relax.backend.weights.tensor_files import TensorFiles, write_tensors
from relax.errors import UserError
from tests.models import END, FAMILIES, PAD, TokenPair, load, random_pairs, save_tiny, scores, stock_logps

TEXTS = ["short", "a rather longer answer, with more words", "mid-sized one"]


def export(source: Path, output: Path, **options: Any) -> Any:
    """Load `source`, export it to `output`; returns our model."""
    model = load(source, **options)
    export_hf([model], read_hf_config(source), source=source, output=output, loss_type="dpo", step=7)
    return model


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_policy_export_has_equal_logits_in_stock_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    stock = save_tiny(tmp_path / "hf", family, tie_word_embeddings=tied)
    model = export(tmp_path / "hf", tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    ids = torch.arange(40)[None] * 5
    with torch.no_grad():
        assert torch.equal(again(ids).logits, stock(ids).logits)
    pairs = random_pairs()
    torch.testing.assert_close(scores(model, pairs).double(), stock_logps(again, pairs), rtol=2e-5, atol=0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("family", FAMILIES)
def test_reward_export_scores_a_padded_batch_as_our_model_does(tmp_path: Path, family: str, pad: str) -> None:
    """Right padding by the exported tokenizer, answers of different lengths that end with the end token."""
    save_tiny(tmp_path / "hf", family, head="scalar", pad=pad)
    model = export(tmp_path / "hf", tmp_path / "out", head="scalar")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", padding_side="right")
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    sequences = [tokenizer(text + END)["input_ids"] for text in TEXTS]
    assert {ids[-1] for ids in sequences} == {tokenizer.convert_tokens_to_ids(END)}
    batch = tokenizer([text + END for text in TEXTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        padded = stock(**batch).logits[:, 0]
        single = torch.cat([stock(torch.tensor([ids])).logits[:, 0] for ids in sequences])
    pairs = [_pair(ids[:2], ids[2:]) for ids in sequences]
    ours = scores(model, pairs)[::2]
    torch.testing.assert_close(single, ours, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(padded, ours, rtol=2e-5, atol=2e-6)


def _pair(prompt: list[int], completion: list[int]) -> TokenPair:
    side = np.array(completion)
    return TokenPair(prompt=np.array(prompt), chosen=side, rejected=side)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_export_holds_the_weights_and_the_tokenizer_byte_for_byte(tmp_path: Path, head: str) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3", head=head, dtype=torch.bfloat16)
    (source / "LICENSE.txt").write_text("terms\n")
    (source / "modeling_qwen3.py").write_text("raise SystemExit\n")
    export(source, output, head=head, dtype=torch.bfloat16)
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt"}
    if head == "lm":
        copied.add("generation_config.json")
    assert {file.name for file in output.iterdir()} == copied | {
        "README.md", "config.json", "model.safetensors", LIST
    }  # fmt: skip
    for name in copied:
        assert (output / name).read_bytes() == (source / name).read_bytes(), name
    stored, found = (load_file(directory / "model.safetensors") for directory in (source, output))
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.usefixtures("on_cpu")
def test_reward_config_is_that_of_a_scalar_classifier(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "qwen2", pad=END)
    edit_config(tmp_path / "hf", quantization_config={"quant_method": "fp8"}, dtype="float32")
    export(tmp_path / "hf", tmp_path / "out", head="scalar", dtype=torch.bfloat16)
    source, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    changed = {"architectures": ["Qwen2ForSequenceClassification"], "dtype": "bfloat16", "pad_token_id": 259}
    changed["problem_type"] = "regression"
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    del source["quantization_config"]
    assert exported == {**source, **changed, **labels}
    assert read_hf_config(tmp_path / "out").num_labels == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|fim_pad|>", 259)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("pad", [PAD, END])
def test_transformers_pipeline_gives_the_reward_as_it_is(tmp_path: Path, pad: str) -> None:
    """Not a probability, alone and in a padded batch."""
    save_tiny(tmp_path / "hf", "qwen3", head="scalar", pad=pad)
    export(tmp_path / "hf", tmp_path / "out", head="scalar")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (config["problem_type"], config["pad_token_id"]) == ("regression", tokenizer.pad_token_id)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    texts = [text + END for text in TEXTS]
    with torch.no_grad():
        rewards = [float(stock(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]
    assert min(rewards) < 0  # which no probability is
    pipe = transformers.pipeline("text-classification", model=str(tmp_path / "out"), device="cpu")
    for batch_size in (1, 3):
        assert [one["score"] for one in pipe(texts, batch_size=batch_size)] == pytest.approx(rewards, rel=2e-5, abs=2e-6)


@pytest.mark.usefixtures("on_cpu")
def test_policy_config_keeps_the_source_but_for_dtype_and_quantization(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "mistral", pad=END)
    edit_config(tmp_path / "hf", quantization_config={"quant_method": "fp8"}, architectures=["Other"])
    export(tmp_path / "hf", tmp_path / "out", dtype=torch.bfloat16)
    source, exported = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    del source["quantization_config"]
    assert exported == {**source, "architectures": ["MistralForCausalLM"], "dtype": "bfloat16"}


@pytest.mark.usefixtures("on_cpu")
def test_the_card_says_what_was_trained_and_names_no_path(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base-model", "qwen3")
    export(tmp_path / "base-model", tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == (
        "---\nlibrary_name: transformers\ntags:\n- relax\n---\n\n# Policy\n\nTrained on preference pairs with relax. "
        "Load it with `AutoModelForCausalLM.from_pretrained`.\n\n- base model: base-model\n- loss: dpo\n- step: 7\n"
    )
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_the_template_that_trained_goes_into_the_export(tmp_path: Path, head: str) -> None:
    """And decides, with what it ends answers, which token pads a reward model's batches."""
    save_tiny(tmp_path / "hf", "qwen3", head=head)
    model = load(tmp_path / "hf", head=head)
    template = "{% for m in messages %}{{ m['content'] }}" + PAD + "{% endfor %}"
    config = read_hf_config(tmp_path / "hf")
    export_hf([model], config, source=tmp_path / "hf", output=tmp_path / "out", chat_template=template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi" + PAD
    if head == "scalar":
        assert tokenizer.pad_token not in (PAD, END)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.usefixtures("on_cpu")
def test_a_tokenizer_that_transformers_reads_otherwise_is_said_on_the_card(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3"):
        save_tiny(tmp_path / family, family)
        export(tmp_path / family, tmp_path / f"{family}-out")
    cards = [(tmp_path / f"{family}-out" / "README.md").read_text() for family in ("qwen2", "qwen3")]
    assert ["the model was trained with PreTrainedTokenizerFast.from_pretrained" in card for card in cards] == [True, False]


@pytest.mark.usefixtures("on_cpu")
def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3")
    export(source, output)
    files = sorted(file.name for file in output.iterdir() if file.name != LIST)
    assert json.loads((output / LIST).read_text()) == {"files": files}
    (output / "model.safetensors").write_bytes(b"")  # of an earlier step
    export(source, output)
    assert (output / "model.safetensors").stat().st_size > 1000
    for taken, message in ((source, "the model's source itself"), (tmp_path, f"is not an export of relax .no {LIST}.")):
        before = sorted(taken.rglob("*"))
        with pytest.raises(UserError, match=message):
            export(source, taken)
        assert sorted(taken.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", source=source)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "hf", "out"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("other", ["ck/iter_0000005/common.pt", "notes.txt", "empty/", ".hidden", "link"])
def test_what_came_into_an_export_is_never_lost(tmp_path: Path, other: str) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3")
    export(source, output)
    added = output / other
    added.parent.mkdir(parents=True, exist_ok=True)
    if other == "link":
        added.symlink_to(source)
    else:
        added.mkdir() if other.endswith("/") else added.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        UserError, match=f"out: beside an earlier export holds {other.rstrip('/')}; export to another directory"
    ):
        export(source, output)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("on_cpu")
def test_a_list_names_no_file_elsewhere(tmp_path: Path) -> None:
    source, output, mine = tmp_path / "hf", tmp_path / "out", tmp_path / "mine"
    save_tiny(source, "qwen3")
    export(source, output)
    mine.write_text("mine")
    files = json.loads((output / LIST).read_text())["files"]
    (output / LIST).write_text(json.dumps({"files": [*files, "../mine", str(mine)]}))
    export(source, output)
    assert mine.read_text() == "mine"
    for broken in ("", "[]", "{}", '{"files": 3}'):
        (output / LIST).write_text(broken)
        with pytest.raises(UserError, match="is not an export of relax"):
            export(source, output)


@pytest.mark.usefixtures("on_cpu")
def test_what_comes_while_an_export_is_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3")
    export(source, output)

    def write(*arguments: Any, **options: Any) -> None:
        (output / "late").write_text("mine")
        write_tensors(*arguments, **options)

    monkeypatch.setattr("relax.backend.weights.export.write_tensors", write)
    export(source, output)
    assert not (output / "late").exists()
    monkeypatch.undo()
    export(source, output)  # nor is it in the way of the next one
    assert [(file.name, file.read_text()) for file in (tmp_path / ".out.old").iterdir()] == [("late", "mine")]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".out.old", "hf", "out"]


@pytest.mark.usefixtures("on_cpu")
def test_an_export_killed_between_its_renames_is_taken_back(tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3")
    export(source, output)
    output.rename(tmp_path / ".out.old")
    with pytest.raises(ZeroDivisionError), _replacing(output, source=source):
        assert (output / "model.safetensors").is_file()
        raise ZeroDivisionError
    export(source, output)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.usefixtures("on_cpu")
def test_a_kill_while_the_former_export_goes_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former export's list goes last: until then the next export knows what the rest is."""
    source, output, removed = tmp_path / "hf", tmp_path / "out", []
    save_tiny(source, "qwen3")
    export(source, output)
    files = len(list(output.iterdir()))
    unlink = Path.unlink

    def kill(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == ".out.old":
            removed.append(path.name)
            if len(removed) == files:
                raise ZeroDivisionError
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", kill)
    with pytest.raises(ZeroDivisionError):
        export(source, output)
    assert removed[-1] == "relax_export.json"
    monkeypatch.undo()
    export(source, output)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.usefixtures("on_cpu")
def test_an_export_through_a_link_replaces_what_it_names(tmp_path: Path) -> None:
    source, output = tmp_path / "hf", tmp_path / "link"
    save_tiny(source, "qwen3")
    (tmp_path / "disk").mkdir()
    output.symlink_to(tmp_path / "disk/out")
    for _ in range(2):
        export(source, output)
        assert output.is_symlink() and [entry.name for entry in (tmp_path / "disk").iterdir()] == ["out"]


@pytest.mark.usefixtures("on_cpu")
def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "hf", tmp_path / "out"
    save_tiny(source, "qwen3")
    export(source, output)
    before = {file.name: file.read_bytes() for file in output.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("relax.backend.weights.export.write_tensors", full)
    with pytest.raises(UserError, match=r"out: the export cannot be written \(\[Errno 28\] No space left on device\)"):
        export(source, output)
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "out"]


def test_shards_hold_every_tensor_once_and_have_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_tensors(tmp_path, iter(tensors.items()), shapes=shapes, dtype=torch.float32, shard_bytes=80)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {f"t{i}": names[i // 2] for i in range(5)}
    files = TensorFiles(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name, axis=None, first=0, size=0), tensor)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"pad": 5}, 5),
        ({"pad": 2, "special": {2: "<eos>", 7: "<|fim_pad|>", 8: "<a>"}}, 7),  # pads with its end: the one named so
        ({"pad": 2, "unk": 0, "special": {0: "<unk>", 2: "<eos>"}}, 0),
        ({"bos": 1, "special": {1: "<bos>", 2: "<eos>", 9: "<a>"}}, 9),  # neither begins nor ends
        ({"pad": 100}, None),  # the embedding has no such row
        ({"pad": 3, "config_eos": [3, 2]}, None),  # the config ends with it, whatever the tokenizer says
        ({"bos": 2, "special": {2: "<|endoftext|>"}}, None),
        ({"pad": 5, "config_pad": 9, "special": {2: "<eos>", 9: "<a>"}}, 9),  # the config's is kept
        ({"pad": 5, "config_pad": 2, "special": {2: "<eos>"}}, 5),
        ({"pad": 5, "config_pad": 9}, 5),  # not a special token: a text may end with it
    ],
)
def test_the_padding_id_never_ends_a_sequence(case: dict[str, Any], expected: int | None) -> None:
    special = case.get("special", {})
    tokenizer = SimpleNamespace(
        pad_token_id=case.get("pad"),
        unk_token_id=case.get("unk"),
        bos_token_id=case.get("bos"),
        eos_token_id=2,
        chat_template=None,
        added_tokens_decoder={i: SimpleNamespace(special=True) for i in special},
        all_special_ids=[],
        convert_ids_to_tokens=special.get,
    )
    config = SimpleNamespace(eos_token_id=case.get("config_eos"), pad_token_id=case.get("config_pad"), vocab_size=50)
    assert padding_id(tokenizer, config) == expected


@pytest.mark.usefixtures("on_cpu")
def test_a_reward_model_that_cannot_pad_says_so(tmp_path: Path) -> None:
    """Without a tokenizer and with the end token as padding: stock refuses batches instead of scoring them wrong."""
    save_tiny(tmp_path / "hf", "llama", pad_token_id=256)
    for file in (tmp_path / "hf").glob("tokenizer*"):
        file.unlink()
    export(tmp_path / "hf", tmp_path / "out", head="scalar")
    assert "- no token can pad safely: score one sequence at a time" in (tmp_path / "out" / "README.md").read_text()
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    stock(torch.tensor([[1, 2, 256]]))
    with pytest.raises(ValueError, match="no padding token is defined"):
        stock(torch.tensor([[1, 2, 256], [1, 256, 256]]))


def edit_config(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
