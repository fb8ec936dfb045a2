"""Load the model's own tokenizer, prove that it behaves, and learn how its chat template closes an answer.

Strategy: two probe messages are rendered before any row. From them come the end-of-turn token (the first special token
behind an answer) and the proof that encoding a rendered string gives the ids that `apply_chat_template` gives, as one
flat list: transformers 5 returns a dict by default, which made every mask of another trainer wrong.

Invariants: no code from the model directory runs but its chat template, under bounds (`template_guard`), and nothing is
downloaded; a text has the ids that the `tokenizers`
library gives it by `tokenizer.json`, whatever class is named beside it; truncation and padding settings inside the file
never touch data.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax.data.encoding import cut_token, encode_texts
from relax.data.template_guard import TemplateOverrun, guard
from relax.data.tokenizer_file import FILE, first_line, stock_tokenizer, take_file
from relax.errors import UserError

_QUESTION, _ANSWER = "relaxquestion", "relaxanswer"


TOKENIZER_FILES = (FILE, "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(directory: Path) -> Any:
    """The fast tokenizer in a local model directory, with `tokenizer.json`'s own ids. Raises `UserError`."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory (--hf-checkpoint): the tokenizer is read from it.")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{directory}: no tokenizer there (none of {', '.join(TOKENIZER_FILES)}); copy its files beside the model."
        )
    tokenizer = stock_tokenizer(directory)
    if (directory / FILE).is_file():
        take_file(tokenizer, directory / FILE)
    # Chosen or left as it is, but set: unset, tokenizers warns at every later fork (checkpoint writers fork).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    guard(tokenizer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What the probe found.

    `end_id` closes an answer; `closes`: the template writes it itself; `cut` may part renders (see `encoding`).
    """

    end_id: int
    closes: bool
    bos_id: int | None
    cut: str | None = None


def has_chat_template(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    return bool(tokenizer.chat_template or template_kwargs.get("chat_template"))


def reads_tools(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether the chat template has a place for tools; one that has none would drop them without a word."""
    return "tools" in str(template_kwargs.get("chat_template") or tokenizer.chat_template)


def probe_template(tokenizer: Any, *, template_kwargs: Mapping[str, Any]) -> TemplateFacts:
    """Render and check two messages. Raises `UserError` when the template or the tokenizer cannot be trusted."""
    question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
    try:
        text = tokenizer.apply_chat_template([question, answer], tokenize=False, **template_kwargs)
        ids = tokenizer.apply_chat_template([question, answer], tokenize=True, return_dict=False, **template_kwargs)
        bare, prompted = (
            tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=add, **template_kwargs)
            for add in (False, True)
        )
    except TemplateOverrun as overrun:
        raise UserError(f"A plain question and answer: {overrun}.") from None
    except Exception as error:  # a template is a program: it raises what it likes
        raise UserError(f"The chat template fails on a plain question and answer: {first_line(error)}") from error
    _check_ids(ids, expected=encode_texts(tokenizer, [text])[0].tolist())
    if _ANSWER not in text:
        raise UserError("Self-check failed: the chat template leaves the assistant's answer out.")
    special = special_ids(tokenizer)
    tail = encode_texts(tokenizer, [text.rpartition(_ANSWER)[2]])[0].tolist()
    end_id = next((token for token in tail if token in special), None)
    return TemplateFacts(
        end_id=eos_id(tokenizer) if end_id is None else end_id,
        closes=end_id is not None,
        bos_id=tokenizer.bos_token_id,
        cut=cut_token(tokenizer, prompted[len(bare) :]) if prompted.startswith(bare) else None,
    )


def _check_ids(ids: Any, *, expected: list[int]) -> None:
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise UserError(
            f"Self-check failed: apply_chat_template gave {type(ids).__name__} where a flat list of token ids was "
            "asked for (tokenize=True, return_dict=False). Use a transformers version that honours return_dict."
        )
    if ids != expected:
        raise UserError("Self-check failed: encoding the rendered chat gives other ids than apply_chat_template does.")


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens: those the tokenizer's tokens file marks so, and the named ones (eos, bos, pad, ...)."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*added, *tokenizer.all_special_ids])


def eos_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no eos_token and its chat template closes no turn: an answer could not end.")
    return int(tokenizer.eos_token_id)


def leading_special_ids(tokenizer: Any) -> np.ndarray:
    """What the tokenizer's post-processor puts before a text (BOS, or nothing), int32."""
    plain = encode_texts(tokenizer, [_QUESTION])[0].tolist()
    full = tokenizer.backend_tokenizer.encode(_QUESTION, add_special_tokens=True).ids
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return np.asarray(full[:start], dtype=np.int32)
