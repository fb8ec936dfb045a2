"""What the documents hold, taken apart: code, prose, tables, links, commands."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str | None = None) -> list[str]:
    """The code blocks of a document, or those of one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text(name), re.M | re.S)
    return [code for kind, code in found if language in (None, kind)]


def block(name: str, part: str) -> str:
    """The one Python block that holds a text."""
    (code,) = (code for code in blocks(name, "python") if part in code)
    return code


def prose(name: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text(name), flags=re.M | re.S)


def headings(name: str) -> list[int]:
    """The levels of its headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(name), re.M)]


def tables(name: str) -> list[int]:
    """The number of columns of every table row, in order."""
    return [line.count("|") for line in text(name).splitlines() if line.startswith("|")]


def rows(name: str) -> dict[str, list[str]]:
    """The cells of every table row whose first cell is one name, by that name."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text(name).splitlines() if line[:1] == "|"
    ]
    return {row[0].strip("`"): row for row in cells if re.fullmatch(r"`[\w.]+`", row[0])}


def spelled(name: str) -> set[str]:
    """Flags, files and names in code spans."""
    return set(re.findall(r"`([^`\n]+)`", prose(name)))


def numbers(name: str) -> set[str]:
    """Numbers of two digits and more, and powers of ten, outside of code blocks."""
    return set(re.findall(r"\d[\d,.]*e-\d+|\d[\d,.]*\d", prose(name)))


def links(name: str) -> list[str]:
    """Relative links and pictures, the Chinese page counted as the English one."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(name)) if "://" not in link]


def commands(name: str) -> list[list[str]]:
    """Every line of its shell blocks, as words."""
    lines = [line for code in blocks(name, "bash") for line in code.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]
