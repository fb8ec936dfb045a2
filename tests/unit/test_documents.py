"""The documents: what they name is there, twins say the same, and tables are the code's.

Links, paths, modules and flags are looked up, commands go through their parsers; `test_documented_code` runs the Python.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from relax import convert, preprocess, score
from relax.cli import arguments
from relax.data import columns, compressed, formats, template_guard
from relax.data.data_report import MARK_NAMES
from relax.data.detection import OTHER_GROUPS
from relax.data.options import INSTRUCTION
from relax.data.rows import REASONS
from relax.objectives import OBJECTIVES, terms
from tests.documents import ROOT, blocks, commands, headings, links, numbers, rows, spelled, tables, text

DOCUMENTS = sorted(str(path.relative_to(ROOT)) for place in (".", "docs", "benchmarks") for path in (ROOT / place).glob("*.md"))
TWINS = [("README.md", "README.zh.md"), ("docs/mindspeed-rl.md", "docs/mindspeed-rl.zh.md")]
PARSERS: dict[str, Callable[[], Any]] = {
    "relax.train": arguments.build_parser,
    "relax.score": score.build_score_parser,
    "relax.convert": convert.build_convert_parser,
    "relax.preprocess": preprocess.build_parser,
}
FOREIGN = {
    "--revision",
    "--local-dir",
    "--repo-type",
    "--nodes",
    "--gpus-per-node",
    "--upgrade-strategy",
}  # hf's, sbatch's, pip's
EXAMPLE = {"--mine-strength", "--mine-per-token"}  # of the objective that docs/objectives.md adds
MADE = ("data/", "models/", "checkpoints/", "log/")  # where commands write and users keep things
TOP = ("relax/", "configs/", "scripts/", "tests/", "benchmarks/", "docs/")


@pytest.mark.parametrize(("english", "chinese"), TWINS)
def test_twins_have_the_same_parts(english: str, chinese: str) -> None:
    """Headings, tables, names, numbers, links, and code up to its comments."""
    for part in (headings, tables, spelled, numbers):
        assert part(english) == part(chinese), part.__name__
    pages = [[link.replace(".zh.md", ".md") for link in links(name)] for name in (english, chinese)]
    assert pages[0] == pages[1]
    code, translated = ([re.sub(r" *# [^\n]*", "", code) for code in blocks(name)] for name in (english, chinese))
    assert code and code == translated


def test_a_readme_is_one_page_with_the_curves_of_a_run() -> None:
    for name in ("README.md", "README.zh.md"):
        assert len(text(name).splitlines()) <= 150 and "docs/curves.png" in links(name)
    picture = ROOT / "docs/curves.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size < 150_000


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link for name in ("README.md", "README.zh.md") for link in links(name)}
    assert {name for name in DOCUMENTS if name.startswith("docs/")} <= linked


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    for link in links(name):
        page, _, anchor = link.partition("#")
        target = (ROOT / name).parent / page if page else ROOT / name
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_that_a_document_names_are_there(name: str) -> None:
    said = re.sub(r"^```\n.*?^```$", "", text(name), flags=re.M | re.S)  # the map has its own test
    for path in re.findall(rf"(?<![\w/.])(?:{'|'.join(TOP)})[\w./{{}},*-]*", said):
        path = path.rstrip(".,")
        plain = re.sub(r"\{.*?\}", "*", re.sub(r"NAME|\*", "*", path))
        assert path == "relax/objectives/mine.py" or list(ROOT.glob(plain.rstrip("/"))), path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_modules_that_a_document_starts_are_there(name: str) -> None:
    for module in re.findall(r"-m ((?:relax|tests|pytest|venv)[\w.]*)", text(name)):
        assert find_spec(module.rstrip(".")), module


def known_flags() -> set[str]:
    found = {flag for build in PARSERS.values() for action in build()._actions for flag in action.option_strings}
    found |= {flag for action in get_args_parser()._actions for flag in action.option_strings}
    others = [
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("scripts/data/*.py"),
        *ROOT.glob("relax/launch/*.py"),
        ROOT / "relax/report.py",
    ]
    return found | {flag for path in others for flag in re.findall(r'"(--[\w-]+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_that_a_document_names_are_flags(name: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text(name)))
    assert named - known_flags() - FOREIGN - EXAMPLE == set()


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "benchmarks/RESULTS.md"])
def test_commands_that_a_document_shows_are_parsed(name: str) -> None:
    for words in commands(name):
        if words[:2] == ["python", "-m"] and words[2] in PARSERS and "..." not in words:
            PARSERS[words[2]]().parse(words[3:])
        elif "bash" in words:
            script = words[words.index("bash") + 1]
            assert (ROOT / script).is_file(), script


def test_the_map_has_every_module() -> None:
    """What it lists is there, and every module is listed, or lies in a directory that is listed without its files."""
    paths: list[str] = []
    stack: list[str] = []
    for indent, entry in re.findall(r"^( *)([\w.]+/?)", blocks("docs/internals.md", "")[0], re.M):
        stack = [*stack[: len(indent) // 2], entry]
        paths.append("".join(stack))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    closed = tuple(path for path in paths if path.endswith("/") and sum(other.startswith(path) for other in paths) == 1)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "relax").rglob("*.py") if not path.name.startswith("__")}
    assert {path for path in modules if not path.startswith(closed)} <= set(paths)


def test_the_tables_of_objectives_are_the_codes() -> None:
    table = rows("docs/objectives.md")
    for name, objective in OBJECTIVES.items():
        assert float(table[name][3]) == objective.default_lr
    for name, term in terms.TERMS.items():
        assert table[name][1].replace("\\|", "|") == term.formula
        said = dict(re.findall(r"`--dpo-([\w-]+)` ([\w.]+)", table[name][3]))
        assert said == {
            key.replace("_", "-"): value if isinstance(value, str) else f"{value:g}" for key, value in term.defaults.items()
        }


def test_the_tables_of_data_are_the_codes() -> None:
    table, said = rows("docs/data.md"), text("docs/data.md")
    assert set(REASONS) <= set(table) and all(f"`{name}`" in said for name, _ in MARK_NAMES.values())
    assert all(f"| `{name}`" in said for name in {*formats.FORMAT_PARTS, *OTHER_GROUPS} - {INSTRUCTION})
    assert all(f"`{kind}`" in said for kind in compressed.COMPRESSIONS)
    assert all(f"`{name}`" in said for name in columns.COLUMNS)
    keys = {action.dest for action in preprocess.build_parser()._actions} - {"help", "config"}
    assert all(f"`{key}`" in said for key in keys)


def test_every_metric_is_explained() -> None:
    said = text("docs/metrics.md")
    names = {metric.name for objective in OBJECTIVES.values() for metric in objective().metrics}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "relax").rglob("*.py"))
    names |= set(re.findall(r'"(?:perf|train)/(\w+)"', code))
    assert {name for name in names if not re.search(rf"\b{name}\b", said)} == set()


def test_the_bounds_of_faults_are_the_codes() -> None:
    said = text("docs/faults.md")
    guard = template_guard
    assert f"{guard.MAX_SECONDS:g} s, {guard.MAX_MEMORY >> 30} GiB and {guard.MAX_CHARS >> 20} Mi characters" in said
    assert f"{compressed.MAX_RATIO} times" in said
