"""Losses over preference pairs. A new one is a file beside `dpo.py` and a line in `LOSSES`, `--loss-type`'s choices."""

from relax.losses.base import Loss, PairScores
from relax.losses.dpo import DPO
from relax.losses.reward_modeling import RewardModel

LOSSES: dict[str, type[Loss]] = {"dpo": DPO, "rm": RewardModel}

__all__ = ["DPO", "LOSSES", "Loss", "PairScores", "RewardModel"]
