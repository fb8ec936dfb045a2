"""Dialogues as one string: `\\n\\nHuman: ...\\n\\nAssistant: ...`, as HH-RLHF writes them."""

import re

from relax.data.rows import Message, RowRejected

_TURN = re.compile(r"(?:\n\n|\A\s*)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(text: str) -> bool:
    """Whether it begins with a turn and has one of the assistant's."""
    match = _TURN.match(text)
    return match is not None and "\n\nAssistant:" in text


def split_dialogue(text: str) -> tuple[list[Message], Message, str]:
    """(history, last answer, the text up to the last answer) of a dialogue string."""
    turns = list(_TURN.finditer(text))
    if len(turns) < 2 or turns[0].start() != 0 or turns[-1][1] != "Assistant":
        raise RowRejected("schema", "the text is not a dialogue of Human: and Assistant: turns that ends with Assistant:")
    ends = [turn.start() for turn in turns[1:]] + [len(text)]
    messages = [
        {"role": _ROLES[turn[1]], "content": text[turn.end() : end].strip()} for turn, end in zip(turns, ends, strict=True)
    ]
    return messages[:-1], messages[-1], text[: turns[-1].end()]
