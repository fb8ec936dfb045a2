"""Who may import whom, read from the sources: what the banned-import rule of ruff cannot say file by file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Modules that stand on nothing else of relax, each as the prefix of what it may import: itself.
SELF_CONTAINED = ("relax.objectives", "relax.packing", "relax.errors", "relax.metrics")
OPERATORS_USE = ("relax.backend.ops", "relax.backend.model.layout")  # operators know neither model nor megatron


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(source: str) -> Iterator[str]:
    """Every module that a source imports at any depth; `from a import b` gives both `a` and `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide who imports whom"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def device_questions(source: str) -> list[str]:
    """Where a source asks which device it has: `x.is_cuda`, `device.type`, torch.cuda's own answers."""
    asked = []
    for node in ast.walk(ast.parse(source)):
        names_type = isinstance(node, ast.Attribute) and node.attr == "type" and "device" in ast.unparse(node.value)
        if names_type or (isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda")):
            asked.append(f"line {node.lineno}: {ast.unparse(node)}")
    return asked


def violations(importer: str, source: str) -> list[str]:
    found = set(imports(source))
    broken = [name for name in found if within(name, "megatron") and not within(importer, "relax.backend")]
    broken += [name for name in found if within(name, "relax.train")]
    if within(importer, "relax.backend.ops"):
        broken += [name for name in found if within(name, "megatron")]
        broken += [name for name in found if within(name, "relax.backend") and not any(within(name, m) for m in OPERATORS_USE)]
    for package in SELF_CONTAINED:
        if within(importer, package):
            broken += [name for name in found if within(name, "relax") and not within(name, package) and name != "relax"]
    return sorted(broken)


@pytest.mark.parametrize("path", sorted((ROOT / "relax").rglob("*.py")), ids=module_name)
def test_module_keeps_the_import_rules(path: Path):
    assert violations(module_name(path), path.read_text(encoding="utf-8")) == []


ASK = ("relax.backend.ops", "relax.backend.device")  # the seams for operators and for megatron


@pytest.mark.parametrize("path", sorted((ROOT / "relax").rglob("*.py")), ids=module_name)
def test_nothing_but_the_seams_asks_for_the_device(path: Path):
    if not any(within(module_name(path), seam) for seam in ASK):
        assert device_questions(path.read_text(encoding="utf-8")) == []


def test_a_question_for_the_device_is_seen():
    source = (
        "a = x.is_cuda\nb = self.device.type == 'cpu'\nc = torch.cuda.is_available()\nd = torch.device('cpu')\ne = row.type"
    )
    assert device_questions(source) == ["line 1: x.is_cuda", "line 2: self.device.type", "line 3: torch.cuda"]


@pytest.mark.parametrize(
    ("importer", "source", "broken"),
    [
        (
            "relax.training.run",
            "def f():\n    from megatron.core import parallel_state",
            ["megatron.core", "megatron.core.parallel_state"],
        ),
        ("relax.backend.engine", "import megatron.core", []),
        ("relax.backend.engine", "from relax import train", ["relax.train"]),
        ("relax.objectives.dpo", "from relax.objectives.base import Scores", []),
        ("relax.objectives.dpo", "from relax.errors import UserError", ["relax.errors", "relax.errors.UserError"]),
        ("relax.metrics", "from relax import packing", ["relax.packing"]),
        ("relax.backend.ops.plain", "import megatron.core", ["megatron.core"]),
        ("relax.backend.ops.plain", "from relax.backend.ops.record import Ops", []),
        ("relax.backend.ops.cpu", "import relax.backend.model.preference_model", ["relax.backend.model.preference_model"]),
    ],
)
def test_the_rules_catch_what_they_name(importer: str, source: str, broken: list[str]):
    assert violations(importer, source) == broken


def test_the_command_line_answers_without_torch():
    """`--help` and a wrong flag take a tenth of a second, not the seconds that torch takes to load."""
    code = "import sys, relax.train; print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
