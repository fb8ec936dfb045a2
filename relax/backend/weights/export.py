"""Export to a directory that stock transformers loads: a policy by AutoModelForCausalLM, a reward model by
AutoModelForSequenceClassification, with equal logits and scores.

Strategy: rank 0 writes beside the output and renames at the end, so the output is whole or as it was. An export lists its
files, and replaces nothing but a directory of such files. Tokenizer files are byte copies of the source's, but for what
`tokenizer_export` tells, and a reward model's padding token. Stock pooling takes the last token that is not
`pad_token_id`; where that id ends sequences (SmolLM2 pads with its end token) it would score the token before. There
another token pads, in config.json and in the tokenizer's files alike, and a padded batch scores as its rows do.
"""

import contextlib
import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from relax.backend.device import is_main_rank
from relax.backend.model.families import HFConfig
from relax.backend.model.preference_model import PreferenceModel
from relax.backend.parallel import agree
from relax.backend.weights.hugging_face import hf_shapes, hf_tensors
from relax.backend.weights.tensor_files import write_tensors
from relax.cli.places import real
from relax.data.tokenizer import has_chat_template, load_tokenizer, probe_template, special_ids
from relax.data.tokenizer_export import copy_tokenizer, settle_class, write_settings
from relax.data.tokenizer_file import read_json
from relax.errors import UserError

LIST = "relax_export.json"


def export_hf(
    chunks: Sequence[PreferenceModel],
    config: HFConfig,
    *,
    source: Path,
    output: Path,
    chat_template: str | None = None,
    loss_type: str | None = None,
    step: int | None = None,
) -> None:
    """Write the model to `output`, replacing an earlier export there. Collective over all ranks.

    source: the Hugging Face directory whose tokenizer the model was trained with; chat_template: the one that rendered the
    pairs, None for that tokenizer's own. UserError, on every rank: see
    `check_output`; the disk refuses.
    """
    shapes, tensors = hf_shapes(chunks, config), hf_tensors(chunks, config)
    details = [f"- base model: {source.resolve().name}"]
    details += [f"- loss: {loss_type}"] if loss_type is not None else []
    details += [f"- step: {step}"] if step is not None else []
    made = "Converted by" if loss_type is None else "Trained on preference pairs with"

    def work() -> None:
        try:
            if is_main_rank():
                with _replacing(output, source=source) as directory:
                    write_tensors(directory, tensors, shapes=shapes, dtype=chunks[0].config.params_dtype)
                    copy_tokenizer(source, directory, chat_template=chat_template)
                    _write_rest(directory, chunks[0], config, source=source, made=made, details=details)
        finally:
            for _ in tensors if dist.get_world_size() > 1 else ():  # every rank gathers to the end, also behind an error
                pass

    agree(work)


def check_output(output: Path, *, source: Path) -> None:
    """UserError unless an export may go to `output`: nothing, an empty directory, or an earlier export alone stands there."""
    if real(output) == real(source):
        raise UserError(f"{output}: the model's source itself; export to another directory")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    listed = _listed(output)
    if listed is None:
        raise UserError(
            f"{output}: exists and is not an export of relax (no {LIST}); export to another directory, or move it away"
        )
    others = sorted(_entries(output) - listed)
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        raise UserError(f"{output}: beside an earlier export holds {named}; export to another directory, or move that away")


def _listed(export: Path) -> set[str] | None:
    """The files that an export wrote, its list among them; None for anything else."""
    try:
        files = json.loads((export / LIST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return {str(file) for file in files} | {LIST} if isinstance(files, list) else None


def _entries(directory: Path) -> set[str]:
    """Everything below a directory, by relative path, but for directories that hold something."""
    return {
        str(entry.relative_to(directory))
        for entry in directory.rglob("*")
        if entry.is_symlink() or not entry.is_dir() or not any(entry.iterdir())
    }


def _remove(export: Path) -> None:
    """Remove what an export wrote, its list last, so that what a kill leaves is still known; what came into it since then
    stays, and so does its directory."""
    for file in sorted(_entries(export) & (_listed(export) or set()), key=lambda file: file == LIST):
        (export / file).unlink()
    for directory in sorted((entry for entry in export.rglob("*") if entry.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            directory.rmdir()
    with contextlib.suppress(OSError):
        export.rmdir()


@contextlib.contextmanager
def _replacing(output: Path, *, source: Path) -> Iterator[Path]:
    """A directory to write, which takes the output's place when the block ends well."""
    check_output(output, source=source)
    target = real(output)  # of a link, what it names is replaced
    aside, old = (target.parent / f".{target.name}.{what}" for what in ("partial", "old"))
    try:
        if _listed(old) and not target.exists():  # killed between the two renames
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        files = sorted(_entries(aside))
        (aside / LIST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        _remove(old)
        if old.exists():  # what is not the export's own lies there, and stays
            old = Path(tempfile.mkdtemp(prefix=f"{old.name}-", dir=old.parent))
        if target.exists():
            target.rename(old)
        aside.rename(target)
        _remove(old)
    except OSError as error:
        raise UserError(f"{output}: the export cannot be written ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_rest(
    directory: Path, model: PreferenceModel, config: HFConfig, *, source: Path, made: str, details: list[str]
) -> None:
    """Everything but the weights and the tokenizer, which is there already."""
    scalar = model.head == "scalar"
    exported = copy.deepcopy(config)
    names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if scalar else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    exported.architectures = [names[config.model_type]]
    exported.dtype = model.config.params_dtype
    if hasattr(exported, "quantization_config"):  # the weights here are not quantized, whatever the source's were
        del exported.quantization_config
    if scalar:
        exported.num_labels = 1
        exported.problem_type = "regression"  # or vLLM and transformers' pipeline pass scores through a sigmoid
        exported.pad_token_id = _set_padding(directory, config)
        if exported.pad_token_id is None:
            details = [*details, "- no token can pad safely: score one sequence at a time"]
    elif (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", directory / "generation_config.json")
    exported.save_pretrained(directory)
    if told := settle_class(directory):
        details = [*details, told]
    kind, auto = ("Reward model", "SequenceClassification") if scalar else ("Policy", "CausalLM")
    text = f"# {kind}\n\n{made} relax. Load it with `AutoModelFor{auto}.from_pretrained`.\n\n"
    head = "---\nlibrary_name: transformers\ntags:\n- relax\n---\n\n"
    (directory / "README.md").write_text(head + text + "\n".join(details) + "\n", encoding="utf-8")


def _set_padding(directory: Path, config: HFConfig) -> int | None:
    """Choose the id that pads a reward model's batches and make the tokenizer in `directory` pad with it."""
    if not (directory / "tokenizer_config.json").is_file():
        return None if config.pad_token_id in _ends(config.eos_token_id) else config.pad_token_id
    tokenizer = load_tokenizer(directory)
    token_id = padding_id(tokenizer, config)
    if token_id is not None and token_id != tokenizer.pad_token_id:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            file = directory / name
            if file.is_file():
                write_settings(file, {**read_json(file), "pad_token": tokenizer.convert_ids_to_tokens(token_id)})
    return token_id


def padding_id(tokenizer: Any, config: HFConfig) -> int | None:
    """An id with which no sequence ends, and which the embedding has; None where the tokenizer knows none.

    The config's own if it is a special token and qualifies; else the tokenizer's; else a special token that is named for
    padding; else the unknown token (byte-level and byte-fallback tokenizers never produce it); else any special token but
    those that begin or end a text or a turn.
    """
    ends = _ends(config.eos_token_id) | _ends(tokenizer.eos_token_id)
    if has_chat_template(tokenizer, {}):
        with contextlib.suppress(UserError):  # a template that renders nothing ends nothing
            ends.add(probe_template(tokenizer, template_kwargs={}).end_id)
    special = sorted(special_ids(tokenizer) - _ends(tokenizer.bos_token_id))
    named = [i for i in special if "pad" in tokenizer.convert_ids_to_tokens(i).lower()]
    own = [i for i in special if i == config.pad_token_id]
    candidates = [*own, tokenizer.pad_token_id, *named, tokenizer.unk_token_id, *special]
    return next((i for i in candidates if i is not None and i not in ends and i < config.vocab_size), None)


def _ends(eos_token_id: int | list[int] | None) -> set[int]:
    """A config's end ids: it may have none, one or several."""
    if eos_token_id is None:
        return set()
    return set(eos_token_id) if isinstance(eos_token_id, list) else {eos_token_id}
