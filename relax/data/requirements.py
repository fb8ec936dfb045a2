"""What an objective needs of its rows, checked once, before any weights: the kinds of groups that it takes, and its columns."""

from itertools import compress

import numpy as np

from relax.data.dataset import GroupDataset
from relax.data.pipeline import kept_rows
from relax.data.tokenized import IndexedFormat
from relax.errors import UserError
from relax.objectives import Objective
from relax.objectives.base import GroupKind

KINDS: dict[GroupKind, str] = {
    "pair": "a pair of a better and a worse completion",
    "tie": "a pair of equally good completions",
    "ranking": "a ranking of more than two completions",
    "single": "a single completion",
}
SHOWN_ROWS = 5


def check_groups(dataset: GroupDataset, objective: Objective, *, flag: str, indexed: IndexedFormat | None) -> None:
    """Refuse groups that the objective, which `flag` chooses, does not take or that lack a column: `UserError` naming rows."""
    takes = " or ".join(KINDS[kind] for kind in objective.takes)
    for kind, groups in group_kinds(dataset).items():
        if kind not in objective.takes:
            _refuse(dataset, groups, f"{KINDS[kind]}, and {flag} takes {takes}", indexed=indexed)
    for column in objective.requires:
        _refuse(dataset, dataset.lacking(column), f"without {column}, which {flag} needs", indexed=indexed)


def group_kinds(dataset: GroupDataset) -> dict[GroupKind, np.ndarray]:
    """Which groups are of each kind, bool [num_groups]."""
    number = np.count_nonzero(dataset.lengths[:, 1:], axis=1)
    tied = np.zeros(len(dataset), dtype=bool) if dataset.ranks is None else dataset.ranks[:, 0] == dataset.ranks[:, 1]
    return {"pair": (number == 2) & ~tied, "tie": (number == 2) & tied, "ranking": number > 2, "single": number == 1}


def _refuse(dataset: GroupDataset, groups: np.ndarray, what: str, *, indexed: IndexedFormat | None) -> None:
    """Raise for groups, bool [num_groups], of which the same is wrong, if there are any."""
    if not groups.any():
        return
    rows = list(compress(kept_rows(dataset.report, indexed=indexed), groups))
    more = f" and {len(rows) - SHOWN_ROWS:,} more" if len(rows) > SHOWN_ROWS else ""
    raise UserError(
        f"{dataset.report.title}: rows that are {what}: {', '.join(rows[:SHOWN_ROWS])}{more}. Take them out, or choose another "
        "loss."
    )
