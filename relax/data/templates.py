"""Named chat templates: `prompt_type` -> a Jinja template of a family's published format.

A template file is one JSON object: name -> `about` (what it is), `tokens` (what the tokenizer must have as tokens of
their own), `template` (a list of strings, put together as they are).
"""

import json
from pathlib import Path
from typing import Any

from relax.errors import UserError


def load_template(name: str, *, path: Path, tokenizer: Any) -> str:
    """The template's text. Raises `UserError` where there is none of the name, or it is not one for this tokenizer."""
    try:
        templates = json.loads(path.read_text(encoding="utf-8"))
        known = {key: (list(entry["tokens"]), "".join(entry["template"])) for key, entry in templates.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"prompt_type_path {path}: cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError):
        raise UserError(
            f'prompt_type_path {path}: must be {{"name": {{"tokens": [...], "template": ["Jinja", ...]}}}}, as '
            "configs/model/templates.json is."
        ) from None
    if name not in known:
        raise UserError(f"prompt_type {name!r} is not in {path}; there are: auto, none, {', '.join(known)}.")
    tokens, template = known[name]
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in tokens if token not in vocabulary]:
        raise UserError(
            f"prompt_type {name} writes {', '.join(missing)}, which the tokenizer does not have: choose the template of its "
            "family, or auto."
        )
    return template
