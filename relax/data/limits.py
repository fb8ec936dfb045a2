"""Length limits of one row, applied before any packing.

1. Each completion keeps at most `max_completion_length` tokens, from its start.
2. Prompt + longest completion keeps at most `max_length` tokens: the prompt loses tokens on its left, the same for all.
3. A row whose full size, the prompt once for each completion (2P + C + R for a pair), exceeds `max_tokens` follows the oversize
   strategy. Prompts count as often even where packing shares them, so that sharing never changes the data.

For a tokenized file nothing is cut: a row with a side longer than `max_length` is refused as `oversize`.

Invariants: the prompt and each completion keep at least one token, or the row is refused; all completions keep the
identical prompt; a row of which two end up with the same ids is refused as `post_truncation_identical`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import combinations

import numpy as np

from relax.data.options import DataOptions
from relax.data.render import GroupIds
from relax.data.rows import RowRejected, completion_names


class Mark(IntFlag):
    """What happened to a kept row; counted in the data report."""

    TRUNCATED = 1  # a completion was cut: it has no end token
    PROMPT_TRUNCATED = 2
    OVERSIZE = 4
    PROMPT_SHRUNK = 8  # the template's side effects moved tokens from the prompt into the completions


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A row that satisfies the limits, ids int32; how many tokens of each completion are trained on; and its marks."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    trained: tuple[int, ...]
    marks: Mark


def apply_limits(group: GroupIds, *, options: DataOptions) -> LimitedGroup:
    """Cut the row to the limits. Raises `RowRejected` (`oversize`, `post_truncation_identical`)."""
    read = _completion_lengths(group, options=options)
    prompt = len(group.prompt)
    if options.to_file and prompt + max(read) > options.max_length:
        raise RowRejected("oversize", f"a side has {prompt + max(read)} tokens, more than {options.max_length}")
    kept = [min(length, options.max_completion_length) for length in read]
    prompt = min(prompt, options.max_length - max(kept))
    oversize = len(kept) * prompt + sum(kept) > options.max_tokens
    if oversize:
        prompt, kept = _fit_budget(prompt, kept, options=options)
    completions = tuple(ids[:length] for ids, length in zip(group.completions, kept, strict=True))
    _refuse_identical(completions)
    marks = Mark(0)
    if tuple(kept) != read:
        marks |= Mark.TRUNCATED
    if prompt < len(group.prompt):
        marks |= Mark.PROMPT_TRUNCATED
    if oversize:
        marks |= Mark.OVERSIZE
    if group.shrunk:
        marks |= Mark.PROMPT_SHRUNK
    trained = tuple(map(min, kept, group.trained))
    return LimitedGroup(group.prompt[len(group.prompt) - prompt :], completions, trained, marks)


def _completion_lengths(group: GroupIds, *, options: DataOptions) -> tuple[int, ...]:
    """How much of each completion this reading of the row takes, before any limit."""
    if options.to_file:
        return tuple(map(len, group.completions))
    return group.rendered if options.whole_render else group.trained


def _refuse_identical(completions: Sequence[np.ndarray]) -> None:
    for (i, ids), (j, other) in combinations(enumerate(completions), 2):
        if np.array_equal(ids, other):
            names = completion_names(len(completions))
            which = "both answers" if len(completions) == 2 else f"{names[i]} and {names[j]}"
            raise RowRejected("post_truncation_identical", f"{which} are the same {len(ids)} tokens")


def _fit_budget(prompt: int, completions: list[int], *, options: DataOptions) -> tuple[int, list[int]]:
    """Lengths of an oversize row after its strategy."""
    number, total, budget = len(completions), sum(completions), options.max_tokens
    if options.oversize_strategy == "keep":
        return prompt, completions
    if options.oversize_strategy == "skip":
        raise RowRejected("oversize", f"{number * prompt + total} tokens exceed --max-tokens-per-gpu {budget}")
    if budget < 2 * number:
        what = "pair" if number == 2 else "such row"
        raise RowRejected("oversize", f"--max-tokens-per-gpu {budget} holds no {what} at all")
    if options.oversize_strategy == "truncate_left":
        prompt = max(1, min(prompt, (budget - total) // number))
        return prompt, _fit_completions(completions, room=budget - number * prompt)
    completions = _fit_completions(completions, room=max(number, budget - number * prompt))
    return min(prompt, (budget - sum(completions)) // number), completions


def _fit_completions(lengths: list[int], *, room: int) -> list[int]:
    """Lengths that fill at most `room`: the longest give way first, then all share evenly."""
    if sum(lengths) <= room:
        return lengths
    for left, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * left > room:  # this one and all that are longer
            return [min(kept, room // left) for kept in lengths]
        room -= length
    return lengths
