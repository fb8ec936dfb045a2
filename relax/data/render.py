"""Rows -> token ids, before any truncation.

Chat: the template renders the history with each completion whole, as inference would (`chat`), and the strings are encoded
whole. The shared prompt is the longest common prefix of them all and of the render of the history plus generation prompt.
Template side effects (Qwen3 inserts or drops `<think>` blocks) shrink that prefix; a completion is never cut.
Plain text (no chat template, or none wanted): prompt and completions are encoded apart, so the prompt ids are the same by
construction. A completion ends as the tokenizer's chat template ends one, where it has a template, else with EOS.

Invariants: all completions have the same prompt ids, and prompt + completion is the whole render up to its end. No completion
is the end token alone. What a policy is trained on of one ends with exactly one end token, whatever the template
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
from relax.data.rows import Group, PlainText, RowRejected, completion_names
from relax.data.tokenizer import (
    TemplateFacts,
    eos_id,
    has_chat_template,
    leading_special_ids,
    probe_template,
)
from relax.errors import UserError


@dataclass(frozen=True, slots=True)
class GroupIds:
    """A row's token ids, int32, each completion as long as the longer of its two readings, which are lengths:

    `trained`: up to the end token, what a policy is trained on; `rendered`: as the template writes it, what a reward model
    reads. The end token is behind the render where the template writes none. `shrunk`: the prompt is shorter than the
    render of the history. `dropped`: fields of messages that the template left out, as `role.field`.
    """

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    trained: tuple[int, ...]
    rendered: tuple[int, ...]
    shrunk: bool = False
    dropped: frozenset[str] = frozenset()


class GroupEncoder:
    """Encodes rows with one tokenizer. Building it runs the self-check and may raise `UserError`."""

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
        """The token that closes a completion."""
        return self._facts.end_id

    def encode(self, groups: Sequence[Group]) -> list[GroupIds | RowRejected]:
        """One result per group, in order; a row whose render fails is a `RowRejected`."""
        if self._chat is None:
            return self._encode_plain([self._plain_text(group) for group in groups])
        return self._encode_chat(groups, self._chat)

    def _encode_chat(self, groups: Sequence[Group], chat: Chat) -> list[GroupIds | RowRejected]:
        rendered = [_attempt(chat.render_group, group) for group in groups]
        good = [result.renders for result in rendered if isinstance(result, Rendered)]
        encoded = iter(encode_renders(self._tokenizer, good, cut=self._facts.cut))
        results: list[GroupIds | RowRejected] = []
        for group, result in zip(groups, rendered, strict=True):
            if isinstance(result, RowRejected):
                results.append(result)
                continue
            history, wholes = next(encoded)
            bos_id = self._facts.bos_id
            ids = RenderIds(_single_bos(history, bos_id), tuple(_single_bos(whole, bos_id) for whole in wholes))
            results.append(_attempt(self._split, ids, partial(self._header_start, chat, group, ids.history), result.dropped))
        return results

    def _split(self, ids: RenderIds, header_start: Callable[[], int], dropped: frozenset[str]) -> GroupIds:
        history, wholes = ids
        shared = min(common_prefix(whole, history) for whole in wholes)
        shrunk = shared < len(history)
        if shared == 0:
            raise RowRejected("prompt_mismatch", "the renders of the completions share no first token")
        if shrunk and shared < header_start():
            raise RowRejected("boundary", f"the renders part after {shared} tokens, before the assistant's turn begins")
        group = _group_ids(history[:shared], [whole[shared:] for whole in wholes], facts=self._facts)
        return replace(group, shrunk=shrunk, dropped=dropped)

    def _header_start(self, chat: Chat, group: Group, history: np.ndarray) -> int:
        """Where the generation prompt begins: the history's render with and without it part there."""
        bare = encode_texts(self._tokenizer, [chat.render_bare(group)])[0]
        return common_prefix(history, _single_bos(bare, self._facts.bos_id))

    def _encode_plain(self, texts: Sequence[PlainText]) -> list[GroupIds | RowRejected]:
        encoded = iter(encode_texts(self._tokenizer, [part for text in texts for part in (text.prompt, *text.completions)]))
        return [_attempt(self._join, next(encoded), [next(encoded) for _ in text.completions]) for text in texts]

    def _join(self, prompt: np.ndarray, completions: Sequence[np.ndarray]) -> GroupIds:
        prompt = _single_bos(np.concatenate([self._leading, prompt]), self._facts.bos_id)
        if not len(prompt):
            raise RowRejected("prompt_mismatch", "the prompt has no tokens")
        ended = _end_all(completions, self._facts)
        whole = self._facts.closes  # the text of a chat goes on behind the end token, as the template's does
        taken = [given if whole and self._facts.end_id in given else end for given, end in zip(completions, ended, strict=True)]
        return _group_ids(prompt, taken, facts=self._facts)

    def _plain_text(self, group: Group) -> PlainText:
        if group.text is None or group.tools:
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
        return group.text


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


def _group_ids(prompt: np.ndarray, completions: Sequence[np.ndarray], *, facts: TemplateFacts) -> GroupIds:
    """The ids of whole completions. Raises `RowRejected` for one that is nothing but the end token."""
    ended = _end_all(completions, facts)
    return GroupIds(
        prompt,
        completions=tuple(max(whole, end, key=len) for whole, end in zip(completions, ended, strict=True)),
        trained=tuple(map(len, ended)),
        rendered=tuple(map(len, completions)),
    )


def _end_all(completions: Sequence[np.ndarray], facts: TemplateFacts) -> list[np.ndarray]:
    """Completions up to their end token. Raises `RowRejected` for one that is nothing but that."""
    ended = [_end_once(ids, facts) for ids in completions]
    for place, ids in enumerate(ended):
        if len(ids) == 1:
            name = completion_names(len(ended))[place]
            raise RowRejected("empty_completion", f"{name} renders to no tokens but the end token")
    return ended


def _end_once(ids: np.ndarray, facts: TemplateFacts) -> np.ndarray:
    """The completion up to its end token, which is added where the template writes none and never doubled."""
    ends = np.flatnonzero(ids == facts.end_id)
    last = int(ends[-1]) if len(ends) and (facts.closes or ends[-1] == len(ids) - 1) else None
    if last is None:
        return np.append(ids, np.int32(facts.end_id))
    while last and ids[last - 1] == facts.end_id:
        last -= 1
    return ids[: last + 1]


def _single_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    return ids[1:] if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id else ids
