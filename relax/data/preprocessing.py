"""Rows -> a tokenized prefix: what `relax.preprocess` does once its settings are right.

Rows take the path that training takes (`relax.data.pipeline`), so the pairs, rejections and report are those of a run
from the raw rows. Invariants: the bytes written do not depend on the number of workers; what is interrupted leaves
nothing under the final names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from relax.data.data_report import DataReport, OneByOne
from relax.data.directories import expand_paths, left_out
from relax.data.formats import FORMAT_PARTS
from relax.data.options import INSTRUCTION, DataOptions
from relax.data.pipeline import scan_files, tokenize_files
from relax.data.prefix import is_prefix
from relax.data.provenance import AUTO, PLAIN, describe_template, describe_tokenizer
from relax.data.template_guard import clock_note, settle_date
from relax.data.templates import load_template
from relax.data.tokenized import IndexedFormat
from relax.data.tokenized_writer import TokenizedWriter
from relax.data.tokenizer import load_tokenizer
from relax.errors import UserError

# A handler is the row formats that it reads.
HANDLERS = {
    "AlpacaStylePairwiseHandler": ("alpaca", "explicit_prompt"),
    "AlpacaStyleInstructionHandler": (INSTRUCTION,),
    "SharegptStylePairwiseHandler": ("sharegpt",),
    "PreferencePairHandler": ("implicit_prompt", "explicit_prompt", "dialogue"),
}
NO_LIMIT = 1 << 30  # tokens of a side, where seq_length is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of a configuration; see `relax.preprocess`. `seq_length` None: no limit; `enable_thinking` None: left out."""

    input: Sequence[str]
    tokenizer_name_or_path: str
    output_prefix: str
    handler_name: str
    map_keys: dict[str, str]
    seq_length: int | None
    prompt_type: str
    prompt_type_path: Path
    enable_thinking: bool | None
    workers: int


def preprocess(settings: Settings, *, indexed: IndexedFormat, progress: Callable[[int, int], None]) -> DataReport:
    """Write the prefix and report. Raises `UserError`."""
    _check_names(settings)
    tokenizer_dir, prefix = Path(settings.tokenizer_name_or_path), Path(settings.output_prefix)
    files = _raw_files(settings.input)
    tokenizer = load_tokenizer(tokenizer_dir)
    options = _data_options(settings, tokenizer)
    scans = scan_files(files, options=options, indexed=None)
    try:
        with TokenizedWriter(prefix, indexed=indexed, instructions=options.single_completion) as writer:
            report = tokenize_files(
                files,
                scans,
                writer,
                tokenizer=tokenizer,
                tokenizer_dir=tokenizer_dir,
                options=options,
                num_workers=settings.workers,
                title=prefix.name,
                indexed=None,
                progress=progress,
            )
            report = report.with_notes(*left_out(settings.input), *clock_note(options.template_kwargs))
            writer.publish(_sidecar(settings, tokenizer=tokenizer, options=options, report=report))
    except OSError as error:
        raise UserError(f"output_prefix {prefix}: cannot be written: {error.strerror or error}") from error
    return report


def _check_names(settings: Settings) -> None:
    if settings.handler_name not in HANDLERS:
        raise UserError(f"handler_name {settings.handler_name!r} is unknown; there are: {', '.join(HANDLERS)}")
    formats = HANDLERS[settings.handler_name]
    completions = () if INSTRUCTION in formats else ("chosen", "rejected")
    parts = dict.fromkeys([part for name in formats for part in FORMAT_PARTS[name]] + list(completions))
    for name in settings.map_keys:
        if name not in parts:
            raise UserError(f"map_keys: {settings.handler_name} reads no {name!r}; it reads: {', '.join(parts)}")


def _raw_files(paths: Sequence[str]) -> list[Path]:
    files = expand_paths(paths)
    for file in files:
        if is_prefix(file):
            raise UserError(f"input {file}: already tokenized; give the rows that it was made from")
    return files


def _data_options(settings: Settings, tokenizer: Any) -> DataOptions:
    """How rows are read and rendered; nothing is cut."""
    kwargs: dict[str, Any] = {}
    plain = settings.prompt_type == PLAIN
    if settings.prompt_type not in (AUTO, PLAIN):
        kwargs["chat_template"] = load_template(settings.prompt_type, path=settings.prompt_type_path, tokenizer=tokenizer)
    if settings.enable_thinking is not None:
        if plain or "enable_thinking" not in str(kwargs.get("chat_template") or tokenizer.chat_template):
            raise UserError(
                f"enable_thinking: the template of prompt_type {settings.prompt_type} does not read it; leave it out"
            )
        kwargs["enable_thinking"] = settings.enable_thinking
    if not plain:
        kwargs = settle_date(kwargs, directory=Path(settings.tokenizer_name_or_path))
    limit = settings.seq_length or NO_LIMIT
    return DataOptions(
        max_length=limit,
        max_completion_length=limit - 1,
        max_tokens=2 * limit,
        chat_template=not plain,
        chat_template_kwargs=kwargs,
        to_file=True,
        row_formats=HANDLERS[settings.handler_name],
        map_keys=settings.map_keys,
    )


def _sidecar(settings: Settings, *, tokenizer: Any, options: DataOptions, report: DataReport) -> dict[str, Any]:
    """What the files were made with, and what became of the rows."""
    return {
        "version": 1,
        "handler_name": settings.handler_name,
        "map_keys": settings.map_keys,
        "seq_length": settings.seq_length,
        "tokenizer": describe_tokenizer(tokenizer, Path(settings.tokenizer_name_or_path)),
        "template": describe_template(tokenizer, options, prompt_type=settings.prompt_type),
        "versions": {name: version(name) for name in ("relax", "transformers", "tokenizers", "megatron-core")},
        "report": report.to_json(rows=OneByOne),
    }
