"""The tokenizer's files of an export: byte copies of the source's, but where those would not do what the model learned.

Invariants: stock transformers renders a conversation as the training rows were rendered, and gives a text the ids that
`tokenizer.json` gives it, as training did; where a family's class in transformers does not, the export says so.
"""

import json
import shutil
from pathlib import Path

from relax.data.tokenizer_file import FILE, read_json, reads_as_written, stock_tokenizer

# By name, never by exclusion: a model directory may also hold code, other formats of the weights, or anything at all.
_COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "tekken.json",
    "spiece.model", "chat_template*", "additional_chat_templates/*", "LICENSE*", "NOTICE*",
)  # fmt: skip
_SETTINGS = "tokenizer_config.json"
# The class that reads tokenizer.json as it is written, by the name that transformers has had for it all along.
_PLAIN_CLASS = "PreTrainedTokenizerFast"


def copy_tokenizer(source: Path, directory: Path, *, chat_template: str | None) -> None:
    """Copy the files of the tokenizer in `source`; `chat_template`: what rendered the rows, None for the tokenizer's own."""
    for file in sorted({file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}):
        target = directory / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    if chat_template is None:
        return
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (directory / "chat_template.json").unlink(missing_ok=True)
    settings = read_json(directory / _SETTINGS)
    if settings.pop("chat_template", None) is not None:
        write_settings(directory / _SETTINGS, settings)


def settle_class(directory: Path) -> str | None:
    """Have transformers read the exported `tokenizer.json` as it is written; a line for the model card where it does not.

    config.json is there already: transformers looks into it for the class.
    """
    if not (directory / FILE).is_file() or reads_as_written(stock_tokenizer(directory), directory / FILE):
        return None
    file = directory / _SETTINGS
    kept = file.read_bytes() if file.is_file() else b"{}\n"
    write_settings(file, {**read_json(file), "tokenizer_class": _PLAIN_CLASS})
    if reads_as_written(stock_tokenizer(directory), directory / FILE):
        return None
    file.write_bytes(kept)
    return (
        f"- tokenizer: transformers' AutoTokenizer reads tokenizer.json otherwise than it is written, by its class for the "
        f"family; the model was trained with {_PLAIN_CLASS}.from_pretrained"
    )


def write_settings(path: Path, settings: dict[str, object]) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
