"""The Python that the documents show runs, and does what they say."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from relax.data import columns, formats, sources
from relax.data.columns import SYNONYMS, resolve_columns
from relax.data.options import DataOptions
from relax.data.rows import RowRejected
from relax.objectives import OBJECTIVES, Scores, terms
from tests.documents import ROOT, block


def test_the_export_loads_as_training_md_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**small, num_labels=1, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "checkpoints/dpo-hf")
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "checkpoints/rm-hf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("docs/training.md", "from_pretrained"), names)
    assert names["policy"](torch.tensor([[1, 2]])).logits.shape == (1, 2, 16)
    assert names["reward_model"](torch.tensor([[1, 2]])).logits[:, 0].shape == (1,)


def test_the_term_of_objectives_md_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict(vars(terms))
    monkeypatch.setattr(terms, "TERMS", dict(terms.TERMS))
    names["TERMS"] = terms.TERMS
    exec("from __future__ import annotations\n" + block("docs/objectives.md", "def _short"), names)
    monkeypatch.setattr("relax.objectives.dpo.TERMS", terms.TERMS)
    values, zeros = torch.tensor([0.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    lengths = torch.tensor([5.0, 3.0, 3.0, 5.0], dtype=torch.float64)
    loss = OBJECTIVES["dpo"](loss="short", length_alpha=0.5)
    losses, _ = loss(Scores(values, lengths=lengths, group=torch.tensor([0, 0, 1, 1]), reference=zeros))
    assert losses.tolist() == pytest.approx([2 * 0.6931471805599453, 0.6931471805599453], rel=1e-12)
    assert "this page's example" in loss.explain()


def test_the_objective_of_objectives_md_is_one() -> None:
    names: dict[str, Any] = {"__name__": "mine"}
    exec(block("docs/objectives.md", "class Mine"), names)
    mine = names["Mine"](strength=0.5, per_token=1.0)
    values, zeros = torch.tensor([3.0, 1.0, 1.0, 2.0]), torch.zeros(4)
    lengths = torch.tensor([5.0, 4.0, 5.0, 5.0])
    losses, metrics = mine(Scores(values, lengths=lengths, group=torch.tensor([0, 0, 1, 1]), reference=zeros))
    assert losses.tolist() == [0.5, 1.5] and metrics["margin"].tolist() == [1.0, -1.0]
    assert list(metrics) == [metric.name for metric in mine.metrics] and mine.needs_reference and mine.head == "lm"


HELP = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch", "numpy", "transformers"), f"--help loads {name}"

sys.meta_path.insert(0, NoTorch())
from mine import Mine
from relax.objectives import OBJECTIVES
OBJECTIVES["mine"] = Mine
from relax.cli.arguments import parse_args
parse_args(["--help"])
"""


def test_help_answers_without_torch_under_that_objective(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("docs/objectives.md", "class Mine"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", HELP], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--mine-strength X mine: what it does, and its unit (default: 0.1)" in " ".join(done.stdout.split())


def test_the_column_of_contributing_reads_a_number() -> None:
    column = eval(block("CONTRIBUTING.md", "Column("), dict(vars(columns)))
    assert (column.name, column.default, column.synonyms, column.parse("2"), column.parse(None)) == (
        "strength", 1.0, ("agreement",), 2.0, None,
    )  # fmt: skip
    with pytest.raises(RowRejected, match="strength is -1: it must be at least 0"):
        column.parse(-1)


def test_the_reader_of_contributing_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("CONTRIBUTING.md", "def _tsv")
    names = dict(vars(sources))
    exec(code, names)
    monkeypatch.setitem(sources.READERS, ".tsv", names["_tsv"])
    file = tmp_path / "a.tsv"
    file.write_text("prompt\tchosen\trejected\nQ\tyes\tno\n")
    (chunk,) = sources.read_chunks(file, file=0)
    assert list(chunk.numbers) == [2] and chunk.rows() == [{"prompt": "Q", "chosen": "yes", "rejected": "no"}]


def test_the_row_format_of_contributing_reads_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("CONTRIBUTING.md", "def _turns")
    names = dict(vars(formats))
    exec(code, names)
    monkeypatch.setitem(SYNONYMS, "turns", ("context",))
    monkeypatch.setitem(formats.READERS, "turns", names["_turns"])
    monkeypatch.setitem(formats.FORMAT_PARTS, "turns", ("turns",))
    row, options = {"context": ["a", "b", "c"], "chosen": "yes", "rejected": "no"}, DataOptions()
    pair = formats.read_group(row, name="turns", columns=resolve_columns(set(row), options=options, path="a"), options=options)
    assert [(m["role"], m["content"]) for m in pair.history] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert [message["content"] for message in pair.completions] == ["yes", "no"]
