"""Length limits of one pair, applied before any packing.

1. Each answer keeps at most `max_completion_length` tokens, from its start.
2. Prompt + longer answer keeps at most `max_length` tokens: the prompt loses tokens on its left, the same for both.
3. A pair whose full size 2P + C + R exceeds `max_tokens` follows the oversize strategy. The full size counts the prompt
   twice even where packing shares it, so that sharing never changes the data.

For a tokenized file nothing is cut: a pair with a side longer than `max_length` is refused as `oversize`.

Invariants: prompt, chosen and rejected each keep at least one token, or the pair is refused; both sides keep the
identical prompt; two answers that end up with the same ids are refused as `post_truncation_identical`.
"""

from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from relax.data.options import DataOptions
from relax.data.render import PairIds
from relax.data.rows import RowRejected


class Mark(IntFlag):
    """What happened to a kept pair; counted in the data report."""

    TRUNCATED = 1  # an answer was cut: it has no end token
    PROMPT_TRUNCATED = 2
    OVERSIZE = 4
    PROMPT_SHRUNK = 8  # the template's side effects moved tokens from the prompt into the answers


@dataclass(frozen=True, slots=True)
class LimitedPair:
    """A pair that satisfies the limits, ids int32; how many tokens of each answer are trained on; and its marks."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    trained: tuple[int, int]
    marks: Mark


def apply_limits(pair: PairIds, *, options: DataOptions) -> LimitedPair:
    """Cut the pair to the limits. Raises `RowRejected` (`oversize`, `post_truncation_identical`)."""
    read = _answer_lengths(pair, options=options)
    prompt = len(pair.prompt)
    if options.to_file and prompt + max(read) > options.max_length:
        raise RowRejected("oversize", f"a side has {prompt + max(read)} tokens, more than {options.max_length}")
    chosen, rejected = (min(length, options.max_completion_length) for length in read)
    prompt = min(prompt, options.max_length - max(chosen, rejected))
    oversize = 2 * prompt + chosen + rejected > options.max_tokens
    if oversize:
        prompt, chosen, rejected = _fit_budget(prompt, chosen, rejected, options=options)
    chosen_ids, rejected_ids = pair.chosen[:chosen], pair.rejected[:rejected]
    if np.array_equal(chosen_ids, rejected_ids) and not options.single_answer:
        raise RowRejected("post_truncation_identical", f"both answers are the same {chosen} tokens")
    marks = Mark(0)
    if (chosen, rejected) != read:
        marks |= Mark.TRUNCATED
    if prompt < len(pair.prompt):
        marks |= Mark.PROMPT_TRUNCATED
    if oversize:
        marks |= Mark.OVERSIZE
    if pair.shrunk:
        marks |= Mark.PROMPT_SHRUNK
    trained = min(chosen, pair.trained[0]), min(rejected, pair.trained[1])
    return LimitedPair(pair.prompt[len(pair.prompt) - prompt :], chosen_ids, rejected_ids, trained, marks)


def _answer_lengths(pair: PairIds, *, options: DataOptions) -> tuple[int, int]:
    """How much of (chosen, rejected) this reading of the pair takes, before any limit."""
    if options.to_file:
        return len(pair.chosen), len(pair.rejected)
    return pair.rendered if options.whole_render else pair.trained


def _fit_budget(prompt: int, chosen: int, rejected: int, *, options: DataOptions) -> tuple[int, int, int]:
    """Lengths of an oversize pair after its strategy."""
    size, budget = 2 * prompt + chosen + rejected, options.max_tokens
    if options.oversize_strategy == "keep":
        return prompt, chosen, rejected
    if options.oversize_strategy == "skip":
        raise RowRejected("oversize", f"{size} tokens exceed --max-tokens-per-gpu {budget}")
    if budget < 4:
        raise RowRejected("oversize", f"--max-tokens-per-gpu {budget} holds no pair at all")
    if options.oversize_strategy == "truncate_left":
        prompt = max(1, min(prompt, (budget - chosen - rejected) // 2))
        return prompt, *_fit_answers(chosen, rejected, room=budget - 2 * prompt)
    chosen, rejected = _fit_answers(chosen, rejected, room=max(2, budget - 2 * prompt))
    return min(prompt, (budget - chosen - rejected) // 2), chosen, rejected


def _fit_answers(chosen: int, rejected: int, *, room: int) -> tuple[int, int]:
    """Lengths with chosen + rejected <= room: the longer one gives way first, then both share evenly."""
    if chosen + rejected <= room:
        return chosen, rejected
    half = room // 2
    if min(chosen, rejected) <= half:
        return (chosen, room - chosen) if chosen < rejected else (room - rejected, rejected)
    return half, half
