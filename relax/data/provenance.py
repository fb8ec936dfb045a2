"""What a tokenized prefix was made with, against what a run would use: another vocabulary would train on other words.

Invariants: a prefix is refused where its tokenizer's vocabulary is not this one's, where it was rendered by the
tokenizer's own template and this run has another, and where a flag that decides how rows are read or rendered is given
and says otherwise: rendering is done, and no flag is ignored.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax.data.directories import expand_paths
from relax.data.options import DataOptions
from relax.data.prefix import is_prefix, read_sidecar, sidecar_path
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError

AUTO = "auto"  # the prompt_type of the tokenizer's own template
PLAIN = "none"  # the prompt_type of rows that are taken as they are


def describe_tokenizer(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """The sidecar's entry: the vocabulary decides what ids mean, whatever files hold it."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])), ensure_ascii=True)
    return {"path": str(directory), "size": len(tokenizer), "sha256": hashlib.sha256(vocabulary.encode()).hexdigest()}


def describe_template(tokenizer: Any, options: DataOptions, *, prompt_type: str) -> dict[str, Any]:
    """The sidecar's entry: what rendered the rows. `text` is None where that is the tokenizer's own template."""
    kwargs = dict(options.template_kwargs)
    given = kwargs.pop("chat_template", None)
    text = given or tokenizer.chat_template
    digest = None if text is None or not options.chat_template else hashlib.sha256(str(text).encode()).hexdigest()
    return {"prompt_type": prompt_type, "sha256": digest, "kwargs": kwargs, "text": given}


def trained_template(paths: Sequence[str], *, tokenizer_dir: Path, options: DataOptions) -> str | None:
    """The chat template that renders, or rendered, the rows of `paths`, for an export; None for the tokenizer's own.

    Raises `UserError` where that is not one template, or a prefix does not say which.
    """
    given = options.template_kwargs.get("chat_template")
    if given and "{" not in given:  # the name of one of the tokenizer's templates
        given = load_tokenizer(tokenizer_dir).get_chat_template(given)
    files = expand_paths(paths)
    found = {path: given or (_prefix_template(path) if is_prefix(path) else None) for path in files}
    first = found[files[0]]
    for path, text in found.items():
        if text != first:
            raise UserError(
                f"{files[0]} and {path} are rendered by different chat templates: the model could not be exported with the one "
                "that it was trained with. Preprocess the data with one prompt_type."
            )
    return first


def _prefix_template(prefix: Path) -> str | None:
    template = (read_sidecar(prefix) or {}).get("template", {"prompt_type": AUTO})
    if template["prompt_type"] in (AUTO, PLAIN):
        return None
    text = template.get("text")
    if not isinstance(text, str):
        raise UserError(
            f"{sidecar_path(prefix)} does not hold the chat template (prompt_type {template['prompt_type']}), which an export "
            "of the model needs. Preprocess the data again."
        )
    return text


def check_provenance(prefix: Path, *, num_pairs: int, tokenizer: Any, tokenizer_dir: Path, options: DataOptions) -> None:
    """Raise `UserError` where a run with these options cannot use the prefix."""
    _check_flags(prefix, options)
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        if options.template_kwargs or not options.chat_template:
            flag = "--apply-chat-template-kwargs" if options.chat_template else "--no-chat-template"
            raise UserError(f"{prefix}: already rendered; {flag} would have no effect on it.")
        return
    if sidecar["num_pairs"] != num_pairs:
        raise UserError(f"{prefix}: holds {num_pairs:,} pairs, but {sidecar_path(prefix).name} says {sidecar['num_pairs']:,}.")
    made, here = sidecar["tokenizer"], describe_tokenizer(tokenizer, tokenizer_dir)
    if made["sha256"] != here["sha256"]:
        raise UserError(
            f"{prefix} was tokenized with {_named(made)}, but --hf-checkpoint gives {_named(here)}: token ids would mean other "
            "words. Give the checkpoint with that tokenizer, or preprocess the data with this one."
        )
    _check_template(prefix, sidecar["template"], tokenizer=tokenizer, options=options)


def _check_template(prefix: Path, made: dict[str, Any], *, tokenizer: Any, options: DataOptions) -> None:
    if not options.chat_template and made["sha256"]:
        raise UserError(
            f"{prefix} was rendered with {_rendering(made)}, and --no-chat-template asks for none: leave the flag out, or "
            f"preprocess the data again with prompt_type {PLAIN}."
        )
    given = options.template_kwargs
    here = describe_template(tokenizer, options, prompt_type=AUTO)
    other_text = (made["prompt_type"] == AUTO or "chat_template" in given) and made["sha256"] != here["sha256"]
    if other_text or (here["kwargs"] and here["kwargs"] != made["kwargs"]):
        told = "--apply-chat-template-kwargs" if given else "--hf-checkpoint"
        raise UserError(
            f"{prefix} was rendered with {_rendering(made)}, but {told} gives {_rendering(here)}. Preprocess the data again, "
            f"or {'leave the flag out' if given else 'give the template that it was made with'}."
        )


def _check_flags(prefix: Path, options: DataOptions) -> None:
    """Flags that name columns or add text find nothing to act on."""
    flags = {
        "--prompt-key": options.prompt_key not in (None, "prompt"),
        "--chosen-key": options.chosen_key not in (None, "chosen"),
        "--rejected-key": options.rejected_key not in (None, "rejected"),
        "--tool-key": options.tool_key not in (None, "tools"),
        "--pair-id-key": options.pair_id_key,
        "--conversation-key-map": options.key_map,
        "--system-prompt": options.system_prompt,
    }
    for flag, given in flags.items():
        if given:
            raise UserError(f"{prefix}: already tokenized; {flag} would have no effect on it.")


def _named(entry: dict[str, Any]) -> str:
    return f"{entry['path']} ({entry['size']:,} tokens, {entry['sha256'][:16]})"


def _rendering(entry: dict[str, Any]) -> str:
    kwargs = f" and {json.dumps(entry['kwargs'])}" if entry["kwargs"] else ""
    template = f"the template {entry['sha256'][:16]}" if entry["sha256"] else "no chat template"
    return f"{template} (prompt_type {entry['prompt_type']}){kwargs}"
