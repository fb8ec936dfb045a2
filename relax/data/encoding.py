"""Strings -> token ids, in batches, encoding what a pair's renders share only once.

Strategy: the renders of a pair begin with the same history. A special token splits the text before any merging, so a
text cut right before one has the ids of both pieces put together. The renders are cut before the last assistant header
(`<|im_start|>` and the like), and the long piece in front of it is encoded once instead of three times.

Invariant: the ids are those of encoding each string whole. Only tokens that take no neighbouring characters with them
serve as a cut; a pair whose renders do not begin with its history is encoded whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Renders(NamedTuple):
    """A pair as rendered: the history with the generation prompt, and both sides whole."""

    history: str
    chosen: str
    rejected: str


class RenderIds(NamedTuple):
    """The ids of `Renders`, int32 [num_tokens] each."""

    history: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text without added special tokens, int32 [num_tokens]."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]


def cut_token(tokenizer: Any, header: str) -> str | None:
    """The special token that begins a generation prompt and may serve as a cut; None where there is none."""
    candidates = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if header.startswith(token.content) and not (token.normalized or token.lstrip or token.single_word)
    ]
    return max(candidates, key=len, default=None)


def encode_renders(tokenizer: Any, renders: Sequence[Renders], *, cut: str | None) -> list[RenderIds]:
    """Ids of each pair's renders, cut before the last `cut` of the history where that is sound."""
    pieces: dict[str, None] = {}  # an ordered set: each piece is encoded once
    plans = [_cut(render, cut) for render in renders]
    for head, tails in plans:
        pieces.update(dict.fromkeys((head, *tails)))
    ids = dict(zip(pieces, encode_texts(tokenizer, list(pieces)), strict=True))
    return [RenderIds(*(np.concatenate([ids[head], ids[tail]]) for tail in tails)) for head, tails in plans]


def _cut(render: Renders, cut: str | None) -> tuple[str, Renders]:
    """(the shared piece in front, the rest of each render); the shared piece is "" for a pair that is not cut."""
    history = render.history
    place = history.rfind(cut) if cut else 0
    if place <= 0 or not (render.chosen.startswith(history) and render.rejected.startswith(history)):
        return "", render
    return history[:place], Renders(*(text[place:] for text in render))
