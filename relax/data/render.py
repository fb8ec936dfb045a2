"""Pairs -> token ids, before any truncation.

Chat: the template renders each side whole, as inference would, and the strings are encoded whole. The shared prompt is
min(longest common prefix of both sides, longest common prefix of each with the render of the history plus generation
prompt). Template side effects (Qwen3 inserts or drops `<think>` blocks) shrink that prefix; an answer is never cut.
Plain text (no chat template): prompt and answers are encoded apart, so the prompt ids are the same by construction.

Invariants: both sides have the same prompt ids, and prompt + answer is the side's render up to its end. No answer is
the end token alone. What a policy is trained on of an answer ends with exactly one end token, whatever the template
writes after it. A leading BOS is never doubled, and never added that neither the template nor the post-processor wrote.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.data.encoding import RenderIds, Renders, encode_renders, encode_texts
from relax.data.options import RESERVED_TEMPLATE_KWARGS, DataOptions
from relax.data.rows import Message, PlainText, PreferencePair, RowRejected
from relax.data.tokenizer import (
    TemplateFacts,
    eos_id,
    has_chat_template,
    leading_special_ids,
    probe_template,
)
from relax.errors import UserError


@dataclass(frozen=True, slots=True)
class PairIds:
    """A pair's token ids, int32, each answer as long as the longer of its two readings, which are lengths (chosen, rejected):

    `trained`: up to the end token, what a policy is trained on; `rendered`: as the template writes it, what a reward model
    reads. The end token is behind the render where the template writes none. `shrunk`: the prompt is shorter than the
    render of the history.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    trained: tuple[int, int]
    rendered: tuple[int, int]
    shrunk: bool = False


class PairEncoder:
    """Encodes pairs with one tokenizer. Building it runs the self-check and may raise `UserError`."""

    def __init__(self, tokenizer: Any, *, options: DataOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._facts: TemplateFacts | None = None
        if has_chat_template(tokenizer, options.template_kwargs):
            self._facts = probe_template(tokenizer, template_kwargs=options.template_kwargs)
            return
        self._eos_id = eos_id(tokenizer)
        self._leading = leading_special_ids(tokenizer)

    @property
    def end_id(self) -> int:
        """The token that closes an answer."""
        return self._eos_id if self._facts is None else self._facts.end_id

    def encode(self, pairs: Sequence[PreferencePair]) -> list[PairIds | RowRejected]:
        """One result per pair, in order; a row whose render fails is a `RowRejected`."""
        if self._facts is None:
            return self._encode_plain([_plain_text(pair) for pair in pairs])
        return self._encode_chat(pairs, self._facts)

    def _encode_chat(self, pairs: Sequence[PreferencePair], facts: TemplateFacts) -> list[PairIds | RowRejected]:
        renders = [self._render_pair(pair) for pair in pairs]
        good = [render for render in renders if not isinstance(render, RowRejected)]
        encoded = iter(encode_renders(self._tokenizer, good, cut=facts.cut))
        results: list[PairIds | RowRejected] = []
        for pair, render in zip(pairs, renders, strict=True):
            if isinstance(render, RowRejected):
                results.append(render)
                continue
            ids = RenderIds(*(_single_bos(side, facts.bos_id) for side in next(encoded)))
            try:
                results.append(self._split(pair, ids, facts))
            except RowRejected as rejection:
                results.append(rejection)
        return results

    def _render_pair(self, pair: PreferencePair) -> Renders | RowRejected:
        try:
            return Renders(
                self._render(pair, pair.history, add_generation_prompt=True),
                self._render(pair, (*pair.history, pair.chosen)),
                self._render(pair, (*pair.history, pair.rejected)),
            )
        except RowRejected as rejection:
            return rejection

    def _render(self, pair: PreferencePair, messages: Iterable[Message], *, add_generation_prompt: bool = False) -> str:
        if reserved := RESERVED_TEMPLATE_KWARGS & pair.template_kwargs.keys():
            raise RowRejected("schema", f"chat_template_kwargs sets {', '.join(sorted(reserved))}")
        kwargs: Mapping[str, Any] = {**self._options.template_kwargs, **pair.template_kwargs}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=pair.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise RowRejected("schema", f"the chat template refuses the row: {error}") from None
        return str(text)

    def _split(self, pair: PreferencePair, ids: RenderIds, facts: TemplateFacts) -> PairIds:
        history, chosen, rejected = ids
        shared = min(common_prefix(chosen, rejected), common_prefix(chosen, history), common_prefix(rejected, history))
        shrunk = shared < len(history)
        if shared == 0:
            raise RowRejected("prompt_mismatch", "the renders of chosen and rejected share no first token")
        if shrunk and shared < self._header_start(pair, history, facts):
            raise RowRejected("boundary", f"the renders part after {shared} tokens, before the assistant's turn begins")
        return _pair_ids(history[:shared], chosen[shared:], rejected[shared:], facts=facts, shrunk=shrunk)

    def _header_start(self, pair: PreferencePair, history: np.ndarray, facts: TemplateFacts) -> int:
        """Where the generation prompt begins: the history's render with and without it part there."""
        bare = encode_texts(self._tokenizer, [self._render(pair, pair.history)])[0]
        return common_prefix(history, _single_bos(bare, facts.bos_id))

    def _encode_plain(self, texts: Sequence[PlainText]) -> list[PairIds | RowRejected]:
        encoded = iter(encode_texts(self._tokenizer, [part for t in texts for part in (t.prompt, t.chosen, t.rejected)]))
        facts = TemplateFacts(end_id=self._eos_id, closes=False, bos_id=self._tokenizer.bos_token_id)
        results: list[PairIds | RowRejected] = []
        for _ in texts:
            prompt, chosen, rejected = (next(encoded) for _ in range(3))
            prompt = _single_bos(np.concatenate([self._leading, prompt]), facts.bos_id)
            try:
                if not len(prompt):
                    raise RowRejected("prompt_mismatch", "the prompt has no tokens")
                ended = _end_both(chosen, rejected, facts)
                results.append(_pair_ids(prompt, *ended, facts=facts))
            except RowRejected as rejection:
                results.append(rejection)
        return results


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def _pair_ids(
    prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray, *, facts: TemplateFacts, shrunk: bool = False
) -> PairIds:
    """The pair of two whole answers. Raises `RowRejected` for one that is nothing but the end token."""
    ended = _end_both(chosen, rejected, facts)
    return PairIds(
        prompt,
        chosen=max(chosen, ended[0], key=len),
        rejected=max(rejected, ended[1], key=len),
        trained=(len(ended[0]), len(ended[1])),
        rendered=(len(chosen), len(rejected)),
        shrunk=shrunk,
    )


def _end_both(chosen: np.ndarray, rejected: np.ndarray, facts: TemplateFacts) -> tuple[np.ndarray, np.ndarray]:
    """Both answers up to their end token. Raises `RowRejected` for one that is nothing but that."""
    ended = _end_once(chosen, facts), _end_once(rejected, facts)
    for side, ids in zip(("chosen", "rejected"), ended, strict=True):
        if len(ids) == 1:
            raise RowRejected("empty_completion", f"{side} renders to no tokens but the end token")
    return ended


def _end_once(ids: np.ndarray, facts: TemplateFacts) -> np.ndarray:
    """The answer up to its end token, which is added where the template writes none and never doubled."""
    ends = np.flatnonzero(ids == facts.end_id)
    last = int(ends[-1]) if len(ends) and (facts.closes or ends[-1] == len(ids) - 1) else None
    if last is None:
        return np.append(ids, np.int32(facts.end_id))
    while last and ids[last - 1] == facts.end_id:
        last -= 1
    return ids[: last + 1]


def _single_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    return ids[1:] if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id else ids


def _plain_text(pair: PreferencePair) -> PlainText:
    if pair.text is None or pair.tools:
        raise UserError(
            "The tokenizer has no chat template, which rows with messages, a system prompt, a history or tools need. "
            "Use a checkpoint with a chat template, or give one: "
            """--apply-chat-template-kwargs '{"chat_template": "..."}' (in preprocessing: prompt_type)."""
        )
    return pair.text
