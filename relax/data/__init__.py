"""Preference rows -> tokenized pairs on disk, and the order in which a run takes them."""

from relax.data.data_report import DataReport
from relax.data.dataset import GroupDataset, TokenizedGroup
from relax.data.load import load_pairs
from relax.data.options import DataOptions
from relax.data.order import PairOrder, epoch_order

__all__ = ["DataOptions", "DataReport", "GroupDataset", "PairOrder", "TokenizedGroup", "epoch_order", "load_pairs"]
