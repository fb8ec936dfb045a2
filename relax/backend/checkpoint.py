"""Finds and loads checkpoints: runs of this project, and Megatron checkpoints made elsewhere as weights.

The tracker's iteration is taken if it is whole; else the newest whole one, and it says so. Whole means that its
`metadata.json` is there (which megatron writes last), a `.metadata` whose files are all there in full, and a
`common.pt` that loads. Saving is in `checkpoint_store`, the file format in `checkpoint_format`.

Invariants:
- Nothing that a checkpoint contains runs as code, whoever made it.
- An unfinished save is never taken. Where nothing else is there, there is no checkpoint; damage to a finished one is an
  error instead, so that no run starts over in silence.
- Loading gives what was asked for, bit for bit, or one UserError on all ranks that names what is missing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.metadata import Metadata

from relax.backend.checkpoint_files import RELEASE, TRACKER, iteration_name, iterations, unfinished
from relax.backend.checkpoint_format import (
    CONFIG,
    read_common,
    read_config,
    read_shards,
    without_objects,
)
from relax.backend.checkpoint_metadata import REFUSAL, Incomplete, read_metadata, tensor_dtype, tensor_sizes
from relax.backend.checkpoint_store import CheckpointStore, save_checkpoint
from relax.backend.device import is_main_rank
from relax.backend.parallel import agree
from relax.errors import UserError

__all__ = ["CheckpointInfo", "CheckpointStore", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

EMBEDDING = "embedding.word_embeddings.weight"
RUN, REFERENCE = "relax_run.json", "relax_dpo_reference.json"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A whole checkpoint and what it holds.

    run: relax_run.json, {} for a checkpoint made elsewhere, whose plain values are not read. reference:
    relax_dpo_reference.json. head: "lm", "scalar", "value" (a PPO critic's), or None where no tensor tells: a language
    model made elsewhere whose output layer is its embedding, or a model without a head. vocab_rows: of its embedding,
    padding included. dtype: the narrowest that holds the model's tensors as they are. flag: the one that named it.
    """

    path: Path
    step: int
    run: dict[str, Any]
    reference: dict[str, Any] | None
    has_optimizer: bool
    has_rng: bool
    head: str | None
    vocab_rows: int | None
    dtype: torch.dtype
    flag: str = "--load"

    @property
    def where(self) -> str:
        """What an error message calls it."""
        return f"{self.flag} {self.path}"


def say_once(text: str) -> None:
    """Print a line, once for all ranks."""
    if is_main_rank():
        print(text, flush=True)


def find_checkpoint(
    directory: Path, *, step: int | None, flag: str, say: Callable[[str], None] = say_once
) -> CheckpointInfo | None:
    """The checkpoint of `step`, or (None) the latest in `directory`, which may also be one iteration's directory.

    None, and `say` why, where the directory is absent, empty or holds only unfinished saves. UserError, which names
    `flag`: not a directory of checkpoints, no such step, a damaged checkpoint and no whole one.
    """
    where = f"{flag} {directory}"
    if not directory.exists():
        say(f"{where}: no checkpoint yet, the directory does not exist")
        return None
    if not directory.is_dir():
        raise UserError(f"{where} is a file; give a directory of checkpoints")
    try:
        if (directory / CONFIG).is_file():
            info: CheckpointInfo | None = _read_single(directory, step=step, where=where)
        elif step is not None:
            info = _read_step(directory, iterations(directory), step=step, where=where)
        else:
            info = _read_latest(directory, iterations(directory), where=where, say=say)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror} at {error.filename}") from None
    return replace(info, flag=flag) if info else None


def _read_single(path: Path, *, step: int | None, where: str) -> CheckpointInfo:
    """`path` is itself an iteration's directory."""
    own = int(path.name.removeprefix("iter_")) if path.name.removeprefix("iter_").isdecimal() else 0
    if step is not None and step != own:
        raise UserError(f"{where} is one checkpoint, of step {own}; step {step} is not in it")
    try:
        return _inspect(path, step=own)
    except Incomplete as problem:
        raise UserError(f"{where} is damaged: {problem}") from None


def _read_step(directory: Path, candidates: dict[int, Path], *, step: int, where: str) -> CheckpointInfo:
    if step not in candidates:
        have = ", ".join(map(str, candidates)) or "none"
        raise UserError(f"{where} has no checkpoint of step {step}; steps there: {have}")
    try:
        return _inspect(candidates[step], step=step)
    except Incomplete as problem:
        raise UserError(f"{where}: {candidates[step].name} cannot be used: {problem}") from None


def _read_latest(
    directory: Path, candidates: dict[int, Path], *, where: str, say: Callable[[str], None]
) -> CheckpointInfo | None:
    tracked = _tracked(directory)
    order = sorted(candidates.items(), key=lambda item: (item[0] != tracked, -item[0]))
    if tracked == RELEASE:
        order.insert(0, (0, directory / RELEASE))
    problems = [] if tracked == RELEASE or tracked in candidates else [_tracker_problem(tracked)]
    damaged = isinstance(tracked, int)
    for step, path in order:
        try:
            info = _inspect(path, step=step)
        except Incomplete as problem:
            problems.append(f"{path.name} cannot be used: {problem}")
            damaged |= problem.finished
            continue
        if problems:
            say(f"{where}: {'; '.join(problems)}; taking {path.name}, the newest complete checkpoint")
        return info
    if damaged:
        raise UserError(
            f"{where} has no complete checkpoint left: {'; '.join(problems)}; restore one, or remove the directory to "
            "start a new run"
        )
    _say_nothing_there(directory, candidates, where=where, say=say)
    return None


def _tracked(directory: Path) -> int | str | None:
    """What the tracker names: a step, "release", any other text, or None where there is no tracker."""
    try:
        text = (directory / TRACKER).read_bytes()[:100].decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isascii() and text.isdecimal() else text


def _tracker_problem(tracked: int | str | None) -> str:
    if tracked is None:
        return f"{TRACKER} is missing"
    if isinstance(tracked, int):
        return f"{TRACKER} names step {tracked}, but {iteration_name(tracked)} is not there"
    return f"{TRACKER} holds {tracked!r} instead of a step"


def _say_nothing_there(directory: Path, candidates: dict[int, Path], *, where: str, say: Callable[[str], None]) -> None:
    """Say why there is no checkpoint; UserError where the directory was made for something else."""
    started = sorted(path.name for path in (*candidates.values(), *unfinished(directory)))
    if started:
        say(f"{where}: no complete checkpoint, only unfinished saves ({', '.join(started)})")
        return
    others = sorted(path.name for path in directory.iterdir() if not path.name.startswith(".") and path.name != TRACKER)
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise UserError(f"{where} is not a directory of checkpoints (iter_*): it holds {shown}")
    say(f"{where}: no checkpoint yet, the directory is empty")


def _inspect(path: Path, *, step: int) -> CheckpointInfo:
    """What a checkpoint holds. Incomplete where it is not whole, UserError where reading it could run code."""
    read_config(path)
    metadata = read_metadata(path)
    sizes = tensor_sizes(metadata)
    run = _read_json(path / RUN) or {}
    common = read_common(path) if run else {}
    return CheckpointInfo(
        path=path,
        step=step,
        run=run,
        reference=_read_json(path / REFERENCE),
        has_optimizer=any(_is_optimizer(key) for key in sizes),
        has_rng="rng" in common or any(key.startswith("rng") for key in sizes),
        head=_head(sizes, run),
        vocab_rows=(sizes.get(EMBEDDING) or (None,))[0],
        dtype=tensor_dtype(metadata, {key for key in sizes if not _is_optimizer(key)}),
    )


def _is_optimizer(key: str) -> bool:
    return key.startswith(("optimizer.", "chained_"))


def _head(sizes: dict[str, tuple[int, ...] | None], run: dict[str, Any]) -> str | None:
    """Which head the model's tensors (key -> global shape) end in; see `CheckpointInfo`."""
    model = {key: size for key, size in sizes.items() if not _is_optimizer(key)}
    if "score.weight" in model:
        return "scalar"
    output = model.get("output_layer.weight")
    if (output and output[0] == 1) or any(part in key for key in model for part in ("value_head", "v_head", "critic")):
        return "value"
    return "lm" if output or run.get("head") == "lm" else None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Incomplete(f"its {path.name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise Incomplete(f"its {path.name} is not a JSON object")
    return content


def load_checkpoint(info: CheckpointInfo, state: dict[str, Any]) -> dict[str, Any]:
    """Load what `state` asks for: sharded tensors (into their own memory, whose dtype they take) and plain values.

    Returns a dict of `state`'s top-level names and no others. Collective. Where megatron allows it (a vocabulary padded
    for another layout), rows that the checkpoint lacks become zero and rows too many are left out. UserError: the
    checkpoint lacks a value, has it in another shape or as bytes, or cannot be read.
    """
    objects, asked = without_objects(state)
    request, local, factories = load_preprocess(asked)
    request, _ = extract_sharded_base(request)
    opened: list[tuple[dict[str, Any], Metadata]] = []
    agree(lambda: opened.append(_open(info, list(nested_values(request)))))
    common, metadata = opened[0]
    agree(lambda: _check_plain(info, set(state) - set(common) - set(request) - set(local) - set(objects)))
    read_shards(request, info.path, metadata, where=info.where)
    result = {name: value for name, value in common.items() if name in state}
    for part in (local, request, dict_list_map_inplace(lambda empty: empty.data, objects)):
        merge(result, part)
    apply_factory_merges(result, factories)
    return result


def _open(info: CheckpointInfo, shards: list[ShardedTensor]) -> tuple[dict[str, Any], Metadata]:
    """The plain values and the metadata of a checkpoint that can serve `shards`."""
    try:
        metadata = read_metadata(info.path)
        common = read_common(info.path) if info.run else {}
    except Incomplete as problem:
        raise UserError(f"{info.where} is damaged: {problem}") from None
    sizes = tensor_sizes(metadata)
    missing = sorted({shard.key for shard in shards} - set(sizes))
    if missing:
        hint = "; --no-load-optim goes on without it" if all(map(_is_optimizer, missing)) else ""
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(f"{info.where} lacks {len(missing)} of the tensors asked for: {shown}{hint}")
    for shard in shards:
        _check_shape(info, shard, sizes[shard.key])
    return common, metadata


def _check_shape(info: CheckpointInfo, shard: ShardedTensor, size: tuple[int, ...] | None) -> None:
    if size is None:
        raise UserError(f"{info.where} holds {shard.key} as bytes, not as a tensor: {REFUSAL}")
    wanted = tuple(shard.global_shape)
    padded = shard.allow_shape_mismatch and size[1:] == wanted[1:] and size[0] > 1
    if size != wanted and not padded:
        raise UserError(
            f"{info.where} holds {shard.key} in shape {list(size)}, but this model needs {list(wanted)}: give "
            "the checkpoint of this model"
        )


def _check_plain(info: CheckpointInfo, missing: set[str]) -> None:
    if missing:
        raise UserError(f"{info.where} lacks what was asked for: {', '.join(sorted(missing))}")
