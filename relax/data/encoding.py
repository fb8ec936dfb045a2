"""Strings -> token ids, in batches, encoding what a row's renders share only once.

Strategy: the renders of a row begin with the same history. A special token splits the text before any merging, so a
text cut right before one has the ids of both pieces put together. The renders are cut before the last assistant header
(`<|im_start|>` and the like), and the long piece in front of it is encoded once instead of once for each.

Invariant: the ids are those of encoding each string whole. Only tokens that take no neighbouring characters with them
serve as a cut; a row whose renders do not begin with its history is encoded whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Renders(NamedTuple):
    """A row as rendered: the history with the generation prompt, and it with each completion, whole."""

    history: str
    wholes: tuple[str, ...]


class RenderIds(NamedTuple):
    """The ids of `Renders`, int32 [num_tokens] each."""

    history: np.ndarray
    wholes: tuple[np.ndarray, ...]


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
    """Ids of each row's renders, cut before the last `cut` of the history where that is sound."""
    pieces: dict[str, None] = {}  # an ordered set: each piece is encoded once
    plans = [_cut(render, cut) for render in renders]
    for head, tails in plans:
        pieces.update(dict.fromkeys((head, *tails)))
    ids = dict(zip(pieces, encode_texts(tokenizer, list(pieces)), strict=True))
    joined = ([np.concatenate([ids[head], ids[tail]]) for tail in tails] for head, tails in plans)
    return [RenderIds(history, tuple(wholes)) for history, *wholes in joined]


def _cut(render: Renders, cut: str | None) -> tuple[str, list[str]]:
    """(the shared piece in front, the rest of each render); the shared piece is "" for a row that is not cut."""
    history = render.history
    place = history.rfind(cut) if cut else 0
    if place <= 0 or not all(whole.startswith(history) for whole in render.wholes):
        return "", [history, *render.wholes]
    return history[:place], [text[place:] for text in (history, *render.wholes)]
