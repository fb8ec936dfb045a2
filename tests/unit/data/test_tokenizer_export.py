"""An export's tokenizer renders and encodes, in stock transformers, as training did."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from relax.data import DataOptions
from relax.data.provenance import trained_template
from relax.data.tokenizer_export import copy_tokenizer, settle_class
from relax.errors import UserError
from tests.unit.data.samples import CHATML, LLAMA, QWEN3, assistant, build_tokenizer, user
from tests.unit.data.test_tokenizer_file import TEXTS, edit, written_ids

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
CHAT = [user("Q"), assistant("A")]


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_copied_byte_for_byte(tmp_path: Path, family: str):
    source = build_tokenizer(tmp_path / "source")
    edit(source, "config.json", model_type=family)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA)
    (source / "modeling_x.py").write_text("raise SystemExit")
    (tmp_path / "out").mkdir()
    copy_tokenizer(source, tmp_path / "out", chat_template=None)
    edit(tmp_path / "out", "config.json", model_type=family)
    copied = files(tmp_path / "out")
    told = settle_class(tmp_path / "out")
    assert files(tmp_path / "out") == copied and (told is None) == (family != "qwen2")
    assert {**copied, "config.json": b"", "modeling_x.py": b""} == {**files(source), "config.json": b"", "modeling_x.py": b""}


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_template_that_was_given_takes_the_place_of_the_tokenizers_own(tmp_path: Path, where: str):
    source = build_tokenizer(tmp_path / "source")
    if where == "tokenizer_config.json":
        (source / "chat_template.jinja").unlink()
        edit(source, where, chat_template=CHATML)
    (tmp_path / "out").mkdir()
    copy_tokenizer(source, tmp_path / "out", chat_template=LLAMA.replace("[INST]", "[ASK]"))
    stock = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "[ASK] Q" in stock.apply_chat_template(CHAT, tokenize=False)
    assert "chat_template" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    untouched = {name: content for name, content in files(source).items() if name not in (where, "chat_template.jinja")}
    assert untouched.items() <= files(tmp_path / "out").items()


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2TokenizerFast"])
@pytest.mark.parametrize("template", [CHATML, QWEN3])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_transformers_reads_an_export_as_training_did(tmp_path: Path, family: str, template: str, name: str):
    source = build_tokenizer(tmp_path / "source", template=template)
    edit(source, "tokenizer_config.json", tokenizer_class=name)
    (tmp_path / "out").mkdir()
    copy_tokenizer(source, tmp_path / "out", chat_template=None)
    edit(tmp_path / "out", "config.json", model_type=family)
    told = settle_class(tmp_path / "out")
    load = AutoTokenizer if told is None else PreTrainedTokenizerFast
    stock = load.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        assert stock.encode(text, add_special_tokens=False) == written_ids(source, text)
    assert stock.eos_token == "<|im_end|>" and stock.apply_chat_template(CHAT, tokenize=False)
    assert family == "qwen2" or told is None, "transformers reads Qwen2's by its own class whatever the files say"


def prefix(directory: Path, name: str, **template: object) -> str:
    for field in ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"):
        for suffix in (".bin", ".idx"):
            (directory / f"{name}_packed_{field}_document{suffix}").write_bytes(b"")
    tokenizer = {"path": "models/a", "size": 1, "sha256": ""}
    template = {"sha256": None, "kwargs": {}, **template}
    sidecar = {"files": {}, "num_pairs": 1, "tokenizer": tokenizer, "template": template}
    (directory / f"{name}_packed.json").write_text(json.dumps(sidecar))
    return str(directory / name)


def test_the_template_of_an_export_is_the_one_that_rendered_the_rows(tmp_path: Path):
    tokenizer = build_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "other.jinja").write_text("{{ 'other' }}")
    (tmp_path / "a.jsonl").write_text("{}\n")
    raw, own = str(tmp_path / "a.jsonl"), prefix(tmp_path, "own", prompt_type="auto", text=None)
    named = prefix(tmp_path, "named", prompt_type="llama2", text=LLAMA)
    plain = prefix(tmp_path, "plain", prompt_type="none", text=None)
    old = prefix(tmp_path, "old", prompt_type="llama2")

    def found(*paths: str, **kwargs: str) -> str | None:
        options = DataOptions(chat_template_kwargs=dict(kwargs))
        return trained_template(paths, tokenizer_dir=tokenizer, options=options)

    assert found(raw) is None and found(own) is None and found(raw, own, plain) is None
    assert found(raw, chat_template=QWEN3) == QWEN3
    assert found(raw, chat_template="other") == "{{ 'other' }}"
    assert found(named) == LLAMA and found(old, chat_template=LLAMA) == LLAMA
    with pytest.raises(UserError, match=r"a\.jsonl and .*/named are rendered by different chat templates"):
        found(raw, named)
    with pytest.raises(UserError, match=r"old_packed\.json does not hold the chat template \(prompt_type llama2\)"):
        found(old)
