"""The documents: both READMEs say the same, and the code that they show runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax.data import formats, sources
from relax.data.columns import SYNONYMS, resolve_columns
from relax.data.options import DataOptions
from relax.objectives import Scores

ROOT = Path(__file__).parents[2]


def blocks(name: str, language: str | None = None) -> list[str]:
    """The code blocks of a document, or those of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    return [code for kind, code in found if language in (None, kind)]


def prose(name: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)


def headings(name: str) -> list[int]:
    """The levels of its headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(name), re.M)]


def tables(name: str) -> list[int]:
    """The number of columns of every table row, in order."""
    return [line.count("|") for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def spelled(name: str) -> set[str]:
    """Flags, files and names in code spans."""
    return set(re.findall(r"`([^`\n]+)`", prose(name)))


def files(name: str) -> list[str]:
    """The files and directories of its map, in order."""
    return re.findall(r"[\w*]+(?:\.py|\.sh|/)", "".join(blocks(name, "")))


def numbers(name: str) -> set[str]:
    """Numbers of two digits and more outside of code blocks."""
    return set(re.findall(r"\d[\d,.]*\d", prose(name)))


def test_both_readmes_have_the_same_parts() -> None:
    """Headings, tables, names, numbers, files, and code up to its comments."""
    english, chinese = "README.md", "README.zh.md"
    for part in (headings, tables, spelled, numbers, files):
        assert part(english) == part(chinese), part.__name__
    for language in ("bash", "python"):
        code, translated = ([re.sub(r" *# [^\n]*", "", text) for text in blocks(name, language)] for name in (english, chinese))
        assert len(code) > 1 and code == translated


def test_the_objective_of_the_readme_is_one() -> None:
    import torch

    (code,) = (code for code in blocks("README.md", "python") if "class Mine" in code)
    names: dict[str, Any] = {"__name__": "mine"}
    exec(code, names)
    mine = names["Mine"](strength=0.5)
    values, zeros = torch.tensor([3.0, 1.0, 1.0, 2.0]), torch.zeros(4)
    losses, metrics = mine(Scores(values, lengths=zeros + 5, group=torch.tensor([0, 0, 1, 1]), reference=zeros))
    assert losses.tolist() == [0.0, 1.5] and metrics["margin"].tolist() == [2.0, -1.0]
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


def test_help_answers_without_torch_under_the_objective_of_the_readme(tmp_path: Path) -> None:
    (code,) = (code for code in blocks("README.md", "python") if "class Mine" in code)
    (tmp_path / "mine.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", HELP], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--mine-strength X mine: what it does, and its unit (default: 0.1)" in " ".join(done.stdout.split())


def test_the_reader_of_contributing_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = blocks("CONTRIBUTING.md", "python")
    names = dict(vars(sources))
    exec(code, names)
    monkeypatch.setitem(sources.READERS, ".tsv", names["_tsv"])
    file = tmp_path / "a.tsv"
    file.write_text("prompt\tchosen\trejected\nQ\tyes\tno\n")
    (chunk,) = sources.read_chunks(file, file=0)
    assert list(chunk.numbers) == [2] and chunk.rows() == [{"prompt": "Q", "chosen": "yes", "rejected": "no"}]


def test_the_row_format_of_contributing_reads_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    _, code = blocks("CONTRIBUTING.md", "python")
    names = dict(vars(formats))
    exec(code, names)
    monkeypatch.setitem(SYNONYMS, "turns", ("context",))
    monkeypatch.setitem(formats.READERS, "turns", names["_turns"])
    monkeypatch.setitem(formats.FORMAT_PARTS, "turns", ("turns",))
    row, options = {"context": ["a", "b", "c"], "chosen": "yes", "rejected": "no"}, DataOptions()
    pair = formats.read_pair(row, name="turns", columns=resolve_columns(set(row), options=options, path="a"), options=options)
    assert [(m["role"], m["content"]) for m in pair.history] == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert (pair.chosen["content"], pair.rejected["content"]) == ("yes", "no")
