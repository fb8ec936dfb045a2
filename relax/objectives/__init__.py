"""Objectives over preference rows. A new one is a file beside `dpo.py` and a line in `OBJECTIVES`, `--loss-type`'s choices."""

from relax.objectives.base import Metric, Objective, Scores, with_role
from relax.objectives.dpo import DPO
from relax.objectives.reward_modeling import RewardModel

OBJECTIVES: dict[str, type[Objective]] = {"dpo": DPO, "rm": RewardModel}

__all__ = ["DPO", "OBJECTIVES", "Metric", "Objective", "RewardModel", "Scores", "with_role"]
