"""Rows -> strings, by the tokenizer's chat template, and proof that the template writes what the row says.

Strategy: a row is rendered as inference would: the history with the generation prompt, and it with each completion, whole.
What the template drops is found by rendering again without it: a field whose absence changes nothing was not written.

Invariants: where completions have histories of their own, all of them render alike, or the row is `prompt_mismatch`. No message
holds a token with which the template begins a turn, nor its end of turn, but for one at the end of a completion: such a row
was templated before. Arguments of tool calls reach the template as objects, or as text where it can only write text.
"""

import json
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relax.data.encoding import Renders, encode_texts
from relax.data.options import ROW_RESERVED_TEMPLATE_KWARGS
from relax.data.rows import Group, Message, RowRejected, printable, shown
from relax.data.tokenizer import TemplateFacts, special_ids

# Fields that link messages; no template needs to write them.
LINKS = frozenset({"id", "tool_call_id"})
# Text of this length in a render is no coincidence: the template wrote it.
_TELLING = 8  # characters
_PROBE: list[Message] = [{"role": "user", "content": "relaxquestion"}, {"role": "assistant", "content": "relaxanswer"}]


class Rendered(NamedTuple):
    """A row's renders, and the fields of its messages that they leave out, as `role.field`."""

    renders: Renders
    dropped: frozenset[str]


class Chat:
    """A tokenizer's chat template, with arguments that every row has."""

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, Any], facts: TemplateFacts) -> None:
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs
        self._text_arguments = False
        self._end = str(tokenizer.convert_ids_to_tokens(facts.end_id))
        self._turns = self._turn_tokens(facts)
        self._text_arguments = self._wants_text_arguments()

    def render_group(self, group: Group) -> Rendered:
        """Raises `RowRejected`."""
        self._refuse_templated(group)
        if reserved := ROW_RESERVED_TEMPLATE_KWARGS & group.template_kwargs.keys():
            raise RowRejected("schema", f"chat_template_kwargs sets {', '.join(sorted(reserved))}")
        renders = Renders(
            self._render(group, group.history, prompt=True),
            tuple(self._render(group, (*group.history_of(i), completion)) for i, completion in enumerate(group.completions)),
        )
        if any(self._render(group, other, prompt=True) != renders.history for other in group.histories[1:]):
            raise RowRejected("prompt_mismatch", "chosen and rejected have different histories")
        return Rendered(renders, frozenset(self._dropped(group, renders)))

    def render_bare(self, group: Group) -> str:
        """The history without a generation prompt."""
        return self._render(group, group.history)

    def _render(self, group: Group, messages: Iterable[Message], *, prompt: bool = False) -> str:
        try:
            return self._apply(messages, tools=group.tools, prompt=prompt, kwargs=group.template_kwargs)
        except Exception as error:  # a template is a program: it raises what it likes
            raise RowRejected("schema", f"the chat template refuses the row: {printable(str(error))}") from None

    def _apply(
        self, messages: Iterable[Message], *, tools: Any = None, prompt: bool = False, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [_with_text_arguments(m) for m in messages] if self._text_arguments else list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **{**self._kwargs, **(kwargs or {})},
            )
        )

    def _dropped(self, group: Group, renders: Renders) -> Iterator[str]:
        """`role.field` of what the renders leave out."""
        for history in group.histories or (group.history,):
            plain = {place for place, m in enumerate(history) if _is_long(m) and m["content"].strip() in renders.history}
            yield from self._left_out(group, history, renders.history, range(len(history)), plain=plain)
        for i, (completion, text) in enumerate(zip(group.completions, renders.wholes, strict=True)):
            history, content = group.history_of(i), completion["content"].strip()
            plain = {len(history)} if text.count(content) > renders.history.count(content) else set()
            yield from self._left_out(group, (*history, completion), text, [len(history)], plain=plain)

    def _left_out(
        self, group: Group, messages: Sequence[Message], text: str, places: Sequence[int], *, plain: Container[int]
    ) -> Iterator[str]:
        """What `text`, the render of all `messages`, leaves out of those at `places`; of `plain` ones it has the content."""
        holders: dict[str, list[int]] = defaultdict(list)
        for place in places:
            if place in plain and len(messages[place]) == 2:  # as most: role and content
                continue
            for name in _fields(messages[place]):
                if name != "content" or place not in plain:
                    holders[name].append(place)
        for name, holding in holders.items():
            if self._same(group, _without(messages, name, holding), text, prompt=len(places) == len(messages)):
                yield from (f"{messages[place]['role']}.{name}" for place in holding)
            elif len(holding) > 1:
                for place in holding:
                    if self._same(group, _without(messages, name, [place]), text, prompt=len(places) == len(messages)):
                        yield f"{messages[place]['role']}.{name}"

    def _same(self, group: Group, messages: Sequence[Message], text: str, *, prompt: bool) -> bool:
        try:
            return self._render(group, messages, prompt=prompt) == text
        except RowRejected:  # the template misses the field: it reads it
            return False

    def _refuse_templated(self, group: Group) -> None:
        prompts = [message for history in group.histories or (group.history,) for message in history]
        for message, end in [*((message, "") for message in prompts), *((message, self._end) for message in group.completions)]:
            for name, text in message.items():
                if not isinstance(text, str):
                    continue
                inner = text.rstrip().removesuffix(end) if end else text
                token = next((token for token in self._turns if token in inner), None)
                if token is not None:
                    raise RowRejected(
                        "schema",
                        f"{name} of a message of role {shown(message['role'])} holds {token}, which the chat template writes "
                        "itself: a row that was templated before. Give the plain text, or take the rows as they are with "
                        "--no-chat-template (in preprocessing: prompt_type none)",
                    )

    def _turn_tokens(self, facts: TemplateFacts) -> tuple[str, ...]:
        """The special tokens that the template writes around messages, but for a BOS that begins the whole."""
        ids = encode_texts(self._tokenizer, [self._apply(_PROBE)])[0].tolist()
        special = special_ids(self._tokenizer)
        turns = dict.fromkeys(token for token in ids if token in special)
        if ids[0] == facts.bos_id and ids.count(facts.bos_id) == 1:
            del turns[ids[0]]
        return tuple(str(self._tokenizer.convert_ids_to_tokens(token)) for token in turns)

    def _wants_text_arguments(self) -> bool:
        """Whether the template fails on a tool call's arguments as an object, or writes the object as Python does."""
        call = {"type": "function", "id": "relax0000", "function": {"name": "f", "arguments": {"relax": "call"}}}
        messages: list[Message] = [_PROBE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return "{'relax': 'call'}" in self._apply(messages)
        except Exception:
            pass
        try:
            self._apply(map(_with_text_arguments, messages))
        except Exception:  # it refuses the probe whatever the arguments
            return False
        return True


def _fields(message: Message) -> list[str]:
    """The fields of a message that have content."""
    empty = [name for name, value in message.items() if value in ("", [], {}) or (name == "content" and not value.strip())]
    return [name for name in message if name not in ("role", *LINKS, *empty)]


def _is_long(message: Message) -> bool:
    """Whether the content is too long to stand in a render by chance."""
    return len(message["content"].strip()) >= _TELLING


def _without(messages: Sequence[Message], name: str, places: Container[int]) -> list[Message]:
    """The messages, those at `places` without a field; without content, they have an empty one."""
    empty = {"content": ""} if name == "content" else {}
    return [
        {**{key: value for key, value in message.items() if key != name}, **empty} if place in places else message
        for place, message in enumerate(messages)
    ]


def _with_text_arguments(message: Message) -> Message:
    """A message whose tool calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call_with_text(call) for call in calls]} if isinstance(calls, list) else message


def _call_with_text(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else call
