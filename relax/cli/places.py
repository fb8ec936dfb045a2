"""Where a command reads and writes: every output is a place of its own.

Invariant: no output is, contains or lies in an input or another output, symbolic links resolved. What writes a place may
replace or delete what is there, and what reads a directory takes all that it finds: two in one place lose or mistake files.
`{iteration}` in a place stands for any step.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from relax.errors import UserError

ITERATION = "{iteration}"

Place = tuple[str, str | Path]  # a flag and its path


def check_apart(*, inputs: Iterable[Place], outputs: Iterable[Place]) -> None:
    """Raise UserError unless each output is a place of its own."""
    taken = list(inputs)
    for flag, path in outputs:
        for other, there in taken:
            if relation := _relation(real(path).parts, real(there).parts):
                raise UserError(
                    f"{flag} {path} {relation} {other} {there}, where the two would overwrite or read each other's files; "
                    f"give {flag} a directory of its own"
                )
        taken.append((flag, path))


def step_paths(path: str) -> list[Path]:
    """What stands already where `path` leads for some step, in order."""
    found = [Path()]
    for part in Path(path).parts:
        if ITERATION in part:
            entries = [entry for parent in found if parent.is_dir() for entry in parent.iterdir()]
            found = [entry for entry in entries if _steps(part).fullmatch(entry.name)]
        else:
            found = [parent / part for parent in found]
    return sorted(entry for entry in found if os.path.lexists(entry))


def real(path: str | Path) -> Path:
    """The path without symbolic links. Unlike `Path.resolve` it stands links that go round."""
    return Path(os.path.realpath(path))


def _relation(one: tuple[str, ...], other: tuple[str, ...]) -> str | None:
    if not all(a == b or _steps(a).fullmatch(b) or _steps(b).fullmatch(a) for a, b in zip(one, other, strict=False)):
        return None
    return "is the place of" if len(one) == len(other) else "contains" if len(one) < len(other) else "lies in"


@cache
def _steps(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(part).replace(re.escape(ITERATION), r"\d+"))
