"""Pairs -> token ids, before any truncation.

Chat: the template renders each side whole, as inference would (`chat`), and the strings are encoded whole. The shared prompt is
min(longest common prefix of both sides, longest common prefix of each with the render of the history plus generation
prompt). Template side effects (Qwen3 inserts or drops `<think>` blocks) shrink that prefix; an answer is never cut.
Plain text (no chat template, or none wanted): prompt and answers are encoded apart, so the prompt ids are the same by
construction. An answer ends as the tokenizer's chat template ends one, where it has a template, else with EOS.

Invariants: both sides have the same prompt ids, and prompt + answer is the side's render up to its end. No answer is
the end token alone. What a policy is trained on of an answer ends with exactly one end token, whatever the template
writes after it. A leading BOS is never doubled, and never added that neither the template nor the post-processor wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from relax.data.chat import Chat, Rendered
from relax.data.encoding import RenderIds, encode_renders, encode_texts
from relax.data.options import DataOptions
from relax.data.rows import PlainText, PreferencePair, RowRejected
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
    render of the history. `dropped`: fields of messages that the template left out, as `role.field`.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    trained: tuple[int, int]
    rendered: tuple[int, int]
    shrunk: bool = False
    dropped: frozenset[str] = frozenset()


class PairEncoder:
    """Encodes pairs with one tokenizer. Building it runs the self-check and may raise `UserError`."""

    def __init__(self, tokenizer: Any, *, options: DataOptions) -> None:
        self._tokenizer = tokenizer
        self._chat: Chat | None = None
        self._asked_plain = not options.chat_template
        if has_chat_template(tokenizer, options.template_kwargs):
            self._facts = probe_template(tokenizer, template_kwargs=options.template_kwargs)
            if options.chat_template:
                self._chat = Chat(tokenizer, template_kwargs=options.template_kwargs, facts=self._facts)
        else:
            self._facts = TemplateFacts(end_id=eos_id(tokenizer), closes=False, bos_id=tokenizer.bos_token_id)
        self._leading = leading_special_ids(tokenizer)

    @property
    def end_id(self) -> int:
        """The token that closes an answer."""
        return self._facts.end_id

    def encode(self, pairs: Sequence[PreferencePair]) -> list[PairIds | RowRejected]:
        """One result per pair, in order; a row whose render fails is a `RowRejected`."""
        if self._chat is None:
            return self._encode_plain([self._plain_text(pair) for pair in pairs])
        return self._encode_chat(pairs, self._chat)

    def _encode_chat(self, pairs: Sequence[PreferencePair], chat: Chat) -> list[PairIds | RowRejected]:
        rendered = [_attempt(chat.render_pair, pair) for pair in pairs]
        good = [result.renders for result in rendered if isinstance(result, Rendered)]
        encoded = iter(encode_renders(self._tokenizer, good, cut=self._facts.cut))
        results: list[PairIds | RowRejected] = []
        for pair, result in zip(pairs, rendered, strict=True):
            if isinstance(result, RowRejected):
                results.append(result)
                continue
            ids = RenderIds(*(_single_bos(side, self._facts.bos_id) for side in next(encoded)))
            results.append(_attempt(self._split, ids, partial(self._header_start, chat, pair, ids.history), result.dropped))
        return results

    def _split(self, ids: RenderIds, header_start: Callable[[], int], dropped: frozenset[str]) -> PairIds:
        history, chosen, rejected = ids
        shared = min(common_prefix(chosen, rejected), common_prefix(chosen, history), common_prefix(rejected, history))
        shrunk = shared < len(history)
        if shared == 0:
            raise RowRejected("prompt_mismatch", "the renders of chosen and rejected share no first token")
        if shrunk and shared < header_start():
            raise RowRejected("boundary", f"the renders part after {shared} tokens, before the assistant's turn begins")
        pair = _pair_ids(history[:shared], chosen[shared:], rejected[shared:], facts=self._facts)
        return replace(pair, shrunk=shrunk, dropped=dropped)

    def _header_start(self, chat: Chat, pair: PreferencePair, history: np.ndarray) -> int:
        """Where the generation prompt begins: the history's render with and without it part there."""
        bare = encode_texts(self._tokenizer, [chat.render_bare(pair)])[0]
        return common_prefix(history, _single_bos(bare, self._facts.bos_id))

    def _encode_plain(self, texts: Sequence[PlainText]) -> list[PairIds | RowRejected]:
        encoded = iter(encode_texts(self._tokenizer, [part for t in texts for part in (t.prompt, t.chosen, t.rejected)]))
        return [_attempt(self._join, *(next(encoded) for _ in range(3))) for _ in texts]

    def _join(self, prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> PairIds:
        prompt = _single_bos(np.concatenate([self._leading, prompt]), self._facts.bos_id)
        if not len(prompt):
            raise RowRejected("prompt_mismatch", "the prompt has no tokens")
        ended = _end_both(chosen, rejected, self._facts)
        whole = self._facts.closes  # the text of a chat goes on behind the end token, as the template's does
        answers = (
            given if whole and self._facts.end_id in given else end
            for given, end in zip((chosen, rejected), ended, strict=True)
        )
        return _pair_ids(prompt, *answers, facts=self._facts)

    def _plain_text(self, pair: PreferencePair) -> PlainText:
        if pair.text is None or pair.tools:
            why, remedy = (
                ("--no-chat-template takes", "Leave the flag out (in preprocessing: prompt_type auto).")
                if self._asked_plain
                else (
                    "The tokenizer has no chat template, so that it takes",
                    "Use a checkpoint with a chat template, or give one: "
                    """--apply-chat-template-kwargs '{"chat_template": "..."}' (in preprocessing: prompt_type).""",
                )
            )
            raise UserError(f"{why} a prompt and answers as text, no messages, system prompt, history or tools. {remedy}")
        return pair.text


T = TypeVar("T")


def _attempt(function: Callable[..., T], *arguments: Any) -> T | RowRejected:
    """What the function returns, or the rejection that it raises."""
    try:
        return function(*arguments)
    except RowRejected as rejection:
        return rejection


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def _pair_ids(prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray, *, facts: TemplateFacts) -> PairIds:
    """The pair of two whole answers. Raises `RowRejected` for one that is nothing but the end token."""
    ended = _end_both(chosen, rejected, facts)
    return PairIds(
        prompt,
        chosen=max(chosen, ended[0], key=len),
        rejected=max(rejected, ended[1], key=len),
        trained=(len(ended[0]), len(ended[1])),
        rendered=(len(chosen), len(rejected)),
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
