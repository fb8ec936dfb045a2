"""The reference pass: score with the reference's weights what a run will use and its table lacks.

Groups are scored in the packing of the first epoch, whose steps are computed whole, so that a policy that equals its reference
gives equal bits at that epoch's steps. The table's file is rank 0's; every rank holds the numbers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from relax.backend.device import describe, is_main_rank
from relax.backend.engine import Engine
from relax.backend.parallel import agree
from relax.errors import UserError
from relax.reference.table import ReferenceTable, table_path
from relax.training.batches import Batches

NUMERICS = 4  # raised where relax computes a score by other operations, so that its bits may be others


def open_table(engine: Engine, batches: Batches, *, reference_sha256: str, directory: Path) -> None:
    """Give the data set its table, with the rows that earlier runs computed under the same identity. Collective.

    UserError, on every rank, where the file cannot be written.
    """
    dataset = batches.dataset
    table = ReferenceTable(dataset.hashes, width=dataset.num_completions, path=None)

    def open_file() -> None:
        nonlocal table
        try:
            path = table_path(directory, _identity(engine, batches, reference_sha256=reference_sha256))
            table = ReferenceTable(dataset.hashes, width=dataset.num_completions, path=path)
        except OSError as error:
            raise _cannot_write(directory, error) from None

    agree(open_file if is_main_rank() else None)
    values = torch.from_numpy(table.values).to(engine.device)
    dist.broadcast(values, src=0)
    table.values = values.cpu().numpy()
    batches.table = table


def fill_table(engine: Engine, batches: Batches, *, steps: range, after_each: Callable[[], None]) -> int:
    """Score with the engine's present weights (the reference's) what `steps` will use and the table lacks; how many groups.

    `after_each` runs after each step's rows are stored. UserError where a score is not finite, or the file cannot
    be written.
    """
    table = batches.table
    assert table is not None
    lacking = batches.order.taken_by(steps) & table.absent
    if not lacking.any():
        _written(table, table.seal)
        return 0
    scored = 0
    for step in batches.order.first_steps_with(lacking):
        _, indices = batches.indices(int(step))
        scores = engine.score(batches.batch(indices, with_reference=False))
        if not np.isfinite(scores).all():
            raise UserError(
                f"the reference gives pair {indices[~np.isfinite(scores).all(axis=1)][0]} a log-probability that is not "
                "a finite number: the weights in --ref-load (default: --hf-checkpoint) are damaged or overflow"
            )
        _written(table, partial(table.put, indices, scores))
        scored += len(indices)
        after_each()
    _written(table, table.seal)
    return scored


def _written(table: ReferenceTable, write: Callable[[], None]) -> None:
    """Run a write to the table; UserError, on every rank, where the file, which is rank 0's, cannot be written."""

    def work() -> None:
        try:
            write()
        except OSError as error:
            assert table.path
            raise _cannot_write(table.path.parent, error) from None

    agree(work, brief=True)


def _cannot_write(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"--data-cache-dir {directory}: the reference table cannot be written: {error.strerror}. Free space, or choose "
        "another place"
    )


def _identity(engine: Engine, batches: Batches, *, reference_sha256: str) -> dict[str, object]:
    """Everything that the numbers depend on, to the last bit."""
    weighed = engine.objective.weighs_tokens
    return {
        **({"token_weights": weighed} if weighed else {}),
        "reference_sha256": reference_sha256,
        "data_fingerprint": batches.dataset.scored_fingerprint,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": describe(engine.device),
        "torch": torch.__version__,
        "numerics": NUMERICS,
        "world_size": dist.get_world_size(),
        "attention": engine.ops.choices["attention"].name,
        "kernels": engine.ops.choices["elementwise work"].name,
        "parallel": str(engine.parallel),
        "packing": str(batches.packing),
        "batch_size": batches.batch_size,
        "order": batches.seed if batches.shuffle else "as in the file",
    }
