"""Pairs that stand both in the training set and in an evaluation set: a score on them says nothing."""

import numpy as np

from relax.data.data_report import counted
from relax.data.dataset import GroupDataset
from relax.errors import UserError


def check_held_out(evaluation: GroupDataset, train: GroupDataset, *, strict: bool) -> None:
    """Note in the evaluation set's report how many of its pairs are trained on. Raises `UserError` for any if `strict`."""
    shared = shared_pairs(evaluation, train)
    if not len(shared):
        return
    of = f"{len(shared):,} of {counted(len(evaluation), 'evaluation pair')}"
    text = f"{of} {'is' if len(shared) == 1 else 'are'} in the training set, too (first: pair {shared[0] + 1})"
    if strict:
        raise UserError(f"{evaluation.report.title}: {text}. Take them out of one set, or leave out --strict-data.")
    evaluation.report = evaluation.report.with_notes(text)


def shared_pairs(evaluation: GroupDataset, train: GroupDataset) -> np.ndarray:
    """Indices, int64 in order, of the evaluation pairs whose token ids are those of a training pair."""
    first_words = np.ascontiguousarray(train.hashes[:, :8]).view("<u8").ravel()
    known = np.sort(np.ascontiguousarray(evaluation.hashes[:, :8]).view("<u8").ravel())
    places = np.minimum(np.searchsorted(known, first_words), len(known) - 1)
    trained = {train.hashes[index].tobytes() for index in np.flatnonzero(known[places] == first_words)}
    return np.array([i for i, row in enumerate(evaluation.hashes) if row.tobytes() in trained], dtype=np.int64)
