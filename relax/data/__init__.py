"""Preference rows -> tokenized pairs on disk, and the order in which a run takes them."""

from relax.data.dataset import PairDataset, TokenizedPair
from relax.data.load import load_pairs
from relax.data.options import DataOptions
from relax.data.order import PairOrder, epoch_order
from relax.data.report import DataReport

__all__ = ["DataOptions", "DataReport", "PairDataset", "PairOrder", "TokenizedPair", "epoch_order", "load_pairs"]
