"""Finds checkpoints: runs of this project, and Megatron checkpoints made elsewhere as weights.

The tracker's iteration is taken if it is complete; else the newest complete one, and it says so. What is wrong with a
checkpoint is one of three things:

- Incomplete: something that a complete one has is not there (`metadata.json`, which megatron writes last, `.metadata`,
  `common.pt`, a file that they or the checksums name), or a file of tensors ends too early. As a save or a copy that was cut
  short leaves it: the search goes on to the next one.
- Damaged: all is there, and a file holds something else than was saved: its checksum differs, or it cannot be read. An
  error, which names the file, the newest complete checkpoint before it and the flags that go on from there: how many
  steps are to be lost is the user's choice.
- A payload: a file asks for what could run code. An error, which names the file.

Invariants:
- Nothing that a checkpoint contains runs as code, whoever made it.
- An unfinished save is never taken. Where nothing else is there, there is no checkpoint; a complete one that lost a part is
  an error instead, so that no run starts over in silence.
- Rank 0 looks, and all ranks get what it found. Each small file is read once; the tensors' own bytes are checked as they are
  read (`checkpoint_checksums`). A checkpoint without checksums is taken, and it says so.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from relax.backend.checkpoint.file_checksums import Checksums, read_checksums
from relax.backend.checkpoint.files import RELEASE, TRACKER, iteration_name, iterations, unfinished
from relax.backend.checkpoint.metadata import (
    METADATA,
    REFUSAL,
    Damaged,
    Incomplete,
    read_metadata,
    tensor_dtype,
    tensor_sizes,
)
from relax.backend.checkpoint.read import Contents, check_config, read_common, read_small
from relax.backend.checkpoint.write import COMMON, CONFIG
from relax.backend.device import is_main_rank
from relax.backend.parallel import from_main_rank
from relax.errors import UserError

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
    contents: Contents = field(repr=False, compare=False)
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
    """The checkpoint of `step`, or (None) the latest in `directory`, which may also be one iteration's directory. Collective.

    None, and `say` why, where the directory is absent, empty or holds only unfinished saves. UserError, which names
    `flag`: not a directory of checkpoints, no such step, a damaged checkpoint, or none that is complete.
    """
    return from_main_rank(lambda: _find(directory, step=step, flag=flag, say=say))


def _find(directory: Path, *, step: int | None, flag: str, say: Callable[[str], None]) -> CheckpointInfo | None:
    where = f"{flag} {directory}"
    if not directory.exists():
        say(f"{where}: no checkpoint yet, the directory does not exist")
        return None
    if not directory.is_dir():
        raise UserError(f"{where} is a file; give a directory of checkpoints")
    try:
        if (directory / CONFIG).is_file():
            info: CheckpointInfo | None = _read_single(directory, step=step, flag=flag)
        elif step is not None:
            info = _read_step(directory, iterations(directory), step=step, flag=flag)
        else:
            info = _read_latest(directory, iterations(directory), flag=flag, say=say)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror} at {error.filename}") from None
    if info and info.contents.checksums is None:
        say(f"{info.where} has no checksums, as one made elsewhere or long ago: damage to its tensors would not be noticed")
    return info


def _read_single(path: Path, *, step: int | None, flag: str) -> CheckpointInfo:
    """`path` is itself an iteration's directory."""
    own = int(path.name.removeprefix("iter_")) if path.name.removeprefix("iter_").isdecimal() else 0
    if step is not None and step != own:
        raise UserError(f"{flag} {path} is one checkpoint, of step {own}; step {step} is not in it")
    try:
        return _look(path, step=own, flag=flag)
    except Incomplete as problem:
        raise UserError(f"{flag} {path} is incomplete: {problem}") from None


def _read_step(directory: Path, candidates: dict[int, Path], *, step: int, flag: str) -> CheckpointInfo:
    if step not in candidates:
        have = ", ".join(map(str, candidates)) or "none"
        raise UserError(f"{flag} {directory} has no checkpoint of step {step}; steps there: {have}")
    try:
        return _look(candidates[step], step=step, flag=flag)
    except Incomplete as problem:
        raise UserError(f"{flag} {directory}: {candidates[step].name} is incomplete: {problem}") from None


def _read_latest(
    directory: Path, candidates: dict[int, Path], *, flag: str, say: Callable[[str], None]
) -> CheckpointInfo | None:
    where, tracked = f"{flag} {directory}", _tracked(directory)
    order = sorted(candidates.items(), key=lambda item: (item[0] != tracked, -item[0]))
    if tracked == RELEASE:
        order.insert(0, (0, directory / RELEASE))
    problems = [] if tracked == RELEASE or tracked in candidates else [_tracker_problem(tracked)]
    lost = isinstance(tracked, int)
    for step, path in order:
        try:
            info = _look(path, step=step, flag=flag)
        except Incomplete as problem:
            problems.append(f"{path.name} is incomplete: {problem}")
            lost |= problem.finished
            continue
        if problems:
            say(f"{where}: {'; '.join(problems)}; taking {path.name}, the newest complete checkpoint")
        return info
    if lost:
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


def _look(path: Path, *, step: int, flag: str) -> CheckpointInfo:
    """What a checkpoint holds. Incomplete, or UserError where it is damaged or reading it could run code."""
    try:
        return _inspect(path, step=step, flag=flag)
    except Damaged as problem:
        raise refusal(path, step=step, flag=flag, problem=problem) from None


def refusal(path: Path, *, step: int, flag: str, problem: Damaged) -> UserError:
    """The error for a damaged checkpoint: what is damaged, and how to go on without it."""
    for earlier, candidate in sorted(iterations(path.parent).items(), reverse=True):
        try:
            if earlier < step and _inspect(candidate, step=earlier, flag=flag):
                break
        except (Incomplete, Damaged, UserError):
            pass
    else:
        return UserError(f"{flag} {path} is damaged: {problem}; no complete checkpoint is before it: restore the file")
    step_flag = "--ref-ckpt-step" if flag == "--ref-load" else "--ckpt-step"
    return UserError(
        f"{flag} {path} is damaged: {problem}; {flag} {path.parent} {step_flag} {earlier} takes the newest complete checkpoint "
        "before it"
    )


def _inspect(path: Path, *, step: int, flag: str) -> CheckpointInfo:
    """What a checkpoint holds. Incomplete, Damaged, or UserError where reading it could run code."""
    config = read_small(path, CONFIG, None, finished=False)
    checksums = read_checksums(path)
    if checksums:
        checksums.check(CONFIG, config)
    check_config(path, config)
    metadata = read_metadata(path, read_small(path, METADATA, checksums))
    sizes = tensor_sizes(metadata)
    run = _read_json(path, RUN, checksums, {"arguments": dict}) or {}
    common = read_common(path, BytesIO(read_small(path, COMMON, checksums))) if run else {}
    _refuse_bytes(path, sizes if run else {})
    return CheckpointInfo(
        path=path,
        step=step,
        run=run,
        reference=_read_json(path, REFERENCE, checksums, {"sha256": str, "tensors": dict, "source": str}),
        has_optimizer=any(is_optimizer(key) for key in sizes),
        has_rng="rng" in common or any(key.startswith("rng") for key in sizes),
        head=_head(sizes, run),
        vocab_rows=(sizes.get(EMBEDDING) or (None,))[0],
        dtype=tensor_dtype(metadata, {key for key in sizes if not is_optimizer(key)}),
        contents=Contents(metadata, common, checksums),
        flag=flag,
    )


def _refuse_bytes(path: Path, sizes: dict[str, tuple[int, ...] | None]) -> None:
    """A run of this project saves tensors alone. megatron's own checkpoints hold bytes, which are never read."""
    for key, size in sizes.items():
        if size is None:
            raise UserError(f"{path / METADATA} holds {key!r:.200} as bytes, not as a tensor: {REFUSAL}")


def is_optimizer(key: str) -> bool:
    """Whether a key is one of the optimizer's."""
    return key.startswith(("optimizer.", "chained_"))


def _head(sizes: dict[str, tuple[int, ...] | None], run: dict[str, Any]) -> str | None:
    """Which head the model's tensors (key -> global shape) end in; see `CheckpointInfo`."""
    model = {key: size for key, size in sizes.items() if not is_optimizer(key)}
    if "score.weight" in model:
        return "scalar"
    output = model.get("output_layer.weight")
    if (output and output[0] == 1) or any(part in key for key in model for part in ("value_head", "v_head", "critic")):
        return "value"
    return "lm" if output or run.get("head") == "lm" else None


def _read_json(path: Path, name: str, checksums: Checksums | None, kinds: dict[str, type]) -> dict[str, Any] | None:
    """A JSON object whose values, where it has them, are of these kinds; None where there is no such file."""
    if not (path / name).exists():
        return None
    try:
        content = json.loads(read_small(path, name, checksums))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its {name} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise Damaged(f"its {name} is not a JSON object")
    for key, kind in kinds.items():
        if type(content.get(key, kind())) is not kind:
            raise Damaged(f"its {name} has no {kind.__name__} as {key}")
    return content
