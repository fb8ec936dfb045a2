"""`tokenizer.json` against what transformers makes of it.

Strategy: the file says what a text's ids are. transformers rebuilds some tokenizers by its class for them, with that
class's own way to part words, so that the ids are other ones; what it built is put aside for the file itself.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from relax.errors import UserError

FILE = "tokenizer.json"

# Where tokenizers differ that part words, normalize or treat their special tokens differently.
_PROBES = (
    "In 20031 the river's  stone?\n\n  It's 650+41 (or $46).\n\tdef f(x):\r\n    return x**2",
    " leading, trailing and    many spaces ",
    "Ünïcode: Straße, ﬁne, e\u0301, 東京で、안녕, हिन्दी, 🤖🏳️\u200d🌈 \u00a0\u3000½²",
    "I'LL I'll don't HELLO_world-2024/12/07 100000000 http://a.b?c=d&e",
)


def stock_tokenizer(directory: Path) -> Any:
    """What transformers makes of the directory, whose ids may be others than `tokenizer.json`'s. Raises `UserError`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its loaders meet: OSError, KeyError, ValueError, ...
        raise UserError(f"{directory}: the tokenizer cannot be loaded: {first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{directory}: the tokenizer has no tokenizer.json (a fast tokenizer), which relax needs.")
    return tokenizer


def reads_as_written(tokenizer: Any, file: Path) -> bool:
    """Whether probe texts are normalized, parted and encoded as by `tokenizer.json` itself, special tokens among them.

    The parts count for themselves: which of them show in the ids of a probe depends on the merges.
    """
    written = _from_file(file)
    special = [token.content for token in written.get_added_tokens_decoder().values()]
    probes = [*_PROBES, *(f"a {token} b{token}\n{token} c" for token in special)]
    return _read(tokenizer.backend_tokenizer, probes) == _read(written, probes)


def _read(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[list[str], list[int]]]:
    """(parts, ids) of each text."""
    parted = []
    for text in texts:
        text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        parted.append(
            [part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] if tokenizer.pre_tokenizer else [text]
        )
    encodings = tokenizer.encode_batch(texts, add_special_tokens=True)
    return [(parts, list(encoding.ids)) for parts, encoding in zip(parted, encodings, strict=True)]


def _from_file(file: Path) -> Tokenizer:
    try:
        written = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no type of its own
        raise UserError(f"{file}: cannot be read: {first_line(error)}") from error
    written.no_truncation()
    written.no_padding()
    return written


def take_file(tokenizer: Any, file: Path) -> None:
    """Put `tokenizer.json` itself behind the tokenizer. Raises `UserError` where token and id do not belong together.

    Tokens that the settings beside the file add to it stay. Its post-processor decides about BOS, as in transformers, where
    add_bos_token counts for nothing beside a tokenizer.json.
    """
    built, written = tokenizer.backend_tokenizer, _from_file(file)
    known = written.get_vocab()
    added = [token for _, token in sorted(built.get_added_tokens_decoder().items()) if token.content not in known]
    written.add_tokens(added)
    for token, token_id in sorted(built.get_vocab().items(), key=lambda item: (item[0] not in known, item[1])):
        if written.token_to_id(token) != token_id:
            raise UserError(
                f"{file}: {token!r} has id {written.token_to_id(token)} there, but {token_id} by the tokenizer's other files "
                f"(as transformers' {type(tokenizer).__name__} reads them): they do not belong together."
            )
    written.encode_special_tokens = built.encode_special_tokens
    tokenizer._tokenizer = written


def tokenizer_notes(tokenizer: Any, directory: Path, *, end_id: int | None) -> tuple[str, ...]:
    """What the user should know of the tokenizer in `directory`, by its files and the model's config. Raises `UserError`.

    end_id closes a policy's answer, where generation has to stop; None where nothing is generated.
    """
    notes = []
    if (directory / FILE).is_file():
        stock = stock_tokenizer(directory)
        if not reads_as_written(stock, directory / FILE):
            notes.append(
                f"{directory / FILE} is read as it is written; transformers' {type(stock).__name__} reads some texts "
                "otherwise (tokenizer_class in tokenizer_config.json)"
            )
    config, generation = (read_json(directory / name) for name in ("config.json", "generation_config.json"))
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if (rows := config.get("vocab_size")) is not None and size > rows:
        notes.append(f"the tokenizer knows ids up to {size - 1:,}, the model a vocabulary of {rows:,}")
    bos = config.get("bos_token_id")
    if None not in (bos, tokenizer.bos_token_id) and bos != tokenizer.bos_token_id:
        notes.append(
            f"bos_token_id is {bos} in config.json, but {_named_id(tokenizer, tokenizer.bos_token_id)} by the tokenizer"
        )
    ends = {token_id for values in (config, generation) for token_id in _as_list(values.get("eos_token_id"))}
    if end_id is not None and ends and end_id not in ends:
        notes.append(
            f"answers end with {_named_id(tokenizer, end_id)}, which is no eos_token_id of config.json or "
            f"generation_config.json ({', '.join(map(str, sorted(ends)))}): generation would not stop there"
        )
    return tuple(notes)


def _named_id(tokenizer: Any, token_id: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token_id)} ({token_id})"


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object beside the tokenizer; empty where there is no such file. Raises `UserError` for anything else."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, not an object of settings.")
    return values


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
