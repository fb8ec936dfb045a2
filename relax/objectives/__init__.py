"""Objectives over preference rows. A new one is a file beside `dpo.py` and a line in `OBJECTIVES`, `--loss-type`'s choices."""

from relax.objectives.base import Metric, Objective, Scores, with_role
from relax.objectives.dpo import DPO
from relax.objectives.reference_free import CPO, ORPO, AlphaPO, SimPO
from relax.objectives.reward_modeling import RewardModel

OBJECTIVES: dict[str, type[Objective]] = {
    "dpo": DPO,
    "rm": RewardModel,
    "simpo": SimPO,
    "alphapo": AlphaPO,
    "cpo": CPO,
    "orpo": ORPO,
}

__all__ = [
    "CPO",
    "DPO",
    "OBJECTIVES",
    "ORPO",
    "AlphaPO",
    "Metric",
    "Objective",
    "RewardModel",
    "Scores",
    "SimPO",
    "with_role",
]
