"""A text has the ids that `tokenizer.json` gives it, whatever transformers' classes make of the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from relax.data.tokenizer import load_tokenizer
from relax.data.tokenizer_file import reads_as_written, stock_tokenizer, take_file, tokenizer_notes
from relax.errors import UserError
from tests.unit.data.samples import CHATML, LLAMA, QWEN3, build_tokenizer, chat_row, load, write_jsonl

TEXTS = (
    "In 20031 the river\n\nstone?",
    "<|im_start|>user\nit's 650 + 41.\n\nstone<|im_end|>\n",
    "  two  spaces ünd 東京\n\n\n\tHe said: I'LL",
)


def edit(directory: Path, name: str, **values: Any) -> None:
    path = directory / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def written_ids(directory: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "name", ["GPT2Tokenizer", "GPT2TokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"]
)
def test_ids_are_the_files_whatever_class_is_named(tmp_path: Path, name: str, model_type: str | None, template: str):
    directory = build_tokenizer(tmp_path / "tokenizer", template=template)
    edit(directory, "tokenizer_config.json", tokenizer_class=name)
    if model_type is not None:
        edit(directory, "config.json", model_type=model_type)
    tokenizer = load_tokenizer(directory)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == written_ids(directory, text)
        assert tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids == written_ids(directory, text)
    assert reads_as_written(tokenizer, directory / "tokenizer.json")


def test_a_class_that_parts_words_otherwise_is_told(tmp_path: Path):
    """GPT-2's class parts "\\n\\n" in front of a word; the file, which has Qwen's split, does not."""
    directory = build_tokenizer(tmp_path / "tokenizer", template=QWEN3)
    edit(directory, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    stock = stock_tokenizer(directory)
    assert stock.encode(TEXTS[0], add_special_tokens=False) != written_ids(directory, TEXTS[0])
    assert not reads_as_written(stock, directory / "tokenizer.json")
    pairs = load(write_jsonl(tmp_path / "a.jsonl", [chat_row(TEXTS[0], "a\n\nstone", "no")]), directory)
    assert pairs.report.notes == (
        f"{directory}/tokenizer.json is read as it is written; transformers' GPT2Tokenizer reads some texts otherwise "
        "(tokenizer_class in tokenizer_config.json)",
    )
    text = "<|im_start|>user\n" + TEXTS[0] + "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert pairs[0].prompt.tolist() == written_ids(directory, text)[: len(pairs[0].prompt)]


def test_a_tokenizer_that_is_read_as_written_needs_no_note(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer")
    pairs = load(write_jsonl(tmp_path / "a.jsonl", [chat_row("Q", "A", "B")]), directory)
    assert pairs.report.notes == ()


def test_tokens_that_the_settings_add_keep_their_ids(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer")
    size = len(load_tokenizer(directory))
    edit(directory, "tokenizer_config.json", pad_token="[PAD]")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.pad_token_id == size and tokenizer.encode("a[PAD]", add_special_tokens=False)[-1] == size


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_file_decides_about_bos(tmp_path: Path, adds_bos: bool):
    directory = build_tokenizer(tmp_path / "tokenizer", template=None, bos="<s>", eos="</s>", adds_bos=adds_bos)
    edit(directory, "tokenizer_config.json", add_bos_token=not adds_bos, tokenizer_class="GPT2Tokenizer")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("one") == [tokenizer.bos_token_id] * adds_bos + written_ids(directory, "one")


def test_a_token_with_two_ids_is_an_error(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer")
    other = stock_tokenizer(directory)
    other.add_tokens(["<a>", "<b>"])
    written = Tokenizer.from_file(str(directory / "tokenizer.json"))
    written.add_tokens(["<b>"])
    written.save(str(directory / "tokenizer.json"))
    size = written.token_to_id("<b>")
    with pytest.raises(
        UserError, match=rf"tokenizer\.json: '<b>' has id {size} there, but {size + 1} by the tokenizer's other"
    ):
        take_file(other, directory / "tokenizer.json")


def test_a_broken_file_is_an_error(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="tokenizer: the tokenizer cannot be loaded: "):
        load_tokenizer(directory)


def test_ids_that_the_model_does_not_share_are_told(tmp_path: Path):
    directory = build_tokenizer(tmp_path / "tokenizer", template=LLAMA, bos="<s>", eos="</s>")
    tokenizer = load_tokenizer(directory)
    bos, eos, largest = tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer) - 1
    edit(directory, "config.json", vocab_size=largest + 1, bos_token_id=bos, eos_token_id=eos)
    assert tokenizer_notes(tokenizer, directory, end_id=eos) == ()
    edit(directory, "config.json", vocab_size=largest, bos_token_id=0, eos_token_id=[0, 1])
    assert tokenizer_notes(tokenizer, directory, end_id=eos) == (
        f"the tokenizer knows ids up to {largest}, the model a vocabulary of {largest}",
        f"bos_token_id is 0 in config.json, but <s> ({bos}) by the tokenizer",
        f"answers end with </s> ({eos}), which is no eos_token_id of config.json or generation_config.json (0, 1): "
        "generation would not stop there",
    )
    assert len(tokenizer_notes(tokenizer, directory, end_id=None)) == 2
    edit(directory, "generation_config.json", eos_token_id=eos)
    assert len(tokenizer_notes(tokenizer, directory, end_id=eos)) == 2
    (directory / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="generation_config.json: holds a list, not an object of settings"):
        tokenizer_notes(tokenizer, directory, end_id=eos)
