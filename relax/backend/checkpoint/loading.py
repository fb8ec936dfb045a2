"""Checkpoints: the entrance for finding, loading and saving them.

Finding is in `checkpoint_find`, saving in `checkpoint_store`, the files' format in `checkpoint_format` (writing) and
`checkpoint_read`.

Invariant: loading gives what was asked for, bit for bit, or one UserError on all ranks that names what is missing or damaged.
"""

import copy
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from relax.backend.checkpoint.find import CheckpointInfo, find_checkpoint, is_optimizer, refusal
from relax.backend.checkpoint.metadata import REFUSAL, Damaged, is_covered, tensor_size
from relax.backend.checkpoint.read import read_shards
from relax.backend.checkpoint.store import CheckpointStore, save_checkpoint
from relax.backend.checkpoint.write import without_objects
from relax.backend.parallel import agree
from relax.errors import UserError

__all__ = ["CheckpointInfo", "CheckpointStore", "find_checkpoint", "load_checkpoint", "save_checkpoint"]


def load_checkpoint(info: CheckpointInfo, state: dict[str, Any]) -> dict[str, Any]:
    """Load what `state` asks for: sharded tensors (into their own memory, whose dtype they take) and plain values.

    Returns a dict of `state`'s top-level names and no others. Collective. Where megatron allows it (a vocabulary padded
    for another layout), rows that the checkpoint lacks become zero and rows too many are left out. UserError: the
    checkpoint lacks a value, has it in another shape or as bytes, or cannot be read.
    """
    objects, asked = without_objects(state)
    request, local, factories = load_preprocess(asked)
    request, _ = extract_sharded_base(request)
    common = info.contents.common
    agree(lambda: _check_shards(info, list(nested_values(request))))
    agree(lambda: _check_plain(info, set(state) - set(common) - set(request) - set(local) - set(objects)))
    try:
        read_shards(request, info.path, info.contents)
    except Damaged as problem:
        raise refusal(info.path, step=info.step, flag=info.flag, problem=problem) from None
    result = {name: copy.deepcopy(value) for name, value in common.items() if name in state}
    for part in (local, request, dict_list_map_inplace(lambda empty: empty.data, objects)):
        merge(result, part)
    apply_factory_merges(result, factories)
    return result


def _check_shards(info: CheckpointInfo, shards: list[ShardedTensor]) -> None:
    """Whether the checkpoint can serve `shards`."""
    metadata = info.contents.metadata
    missing = sorted({shard.key for shard in shards} - metadata.state_dict_metadata.keys())
    if missing:
        hint = "; --no-load-optim goes on without it" if all(map(is_optimizer, missing)) else ""
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(f"{info.where} lacks {len(missing)} of the tensors asked for: {shown}{hint}")
    for shard in shards:
        _check_shape(info, shard, tensor_size(metadata, shard.key))


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
    if not is_covered(info.contents.metadata, shard.key):
        raise UserError(f"{info.where} holds a part of {shard.key} alone")


def _check_plain(info: CheckpointInfo, missing: set[str]) -> None:
    if missing:
        raise UserError(f"{info.where} lacks what was asked for: {', '.join(sorted(missing))}")
