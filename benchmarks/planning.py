"""How well and how fast `plan_step` plans 512 real pairs for 64 ranks: `python benchmarks/planning.py [LENGTHS.csv]`."""

import sys
import time
from pathlib import Path

import numpy as np

from relax.packing import laid_out_tokens, pair_costs, plan_step, shares_prompt

LENGTHS = Path(__file__).parents[1] / "tests" / "unit" / "hh_lengths.csv"
PAIRS, RANKS, AREA_COST, REPEATS = 512, 64, 1 / 6144, 50


def main(file: Path) -> None:
    every = np.loadtxt(file, dtype=np.int64, delimiter=",", skiprows=1)
    print(f"{'prompts':>10}{'budget':>10}{'slowest / mean cost':>22}{'micro-batches':>16}{'median ms':>12}{'least ms':>12}")
    for share_prompt in (True, False):
        for max_tokens in (2048, 4096, 8192):
            lengths = every[:PAIRS]
            seconds = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                plan = plan_step(lengths, dp_size=RANKS, max_tokens=max_tokens, share_prompt=share_prompt)
                seconds.append(time.perf_counter() - start)
            shared = shares_prompt(lengths) & share_prompt
            each, tokens = pair_costs(lengths, shared, area_cost=AREA_COST), laid_out_tokens(lengths, shared)
            ranks = [[pair for micro in rank for pair in micro.pairs] for rank in plan.ranks]
            costs = np.array([each[pairs].sum() for pairs in ranks])
            least = -(-max(tokens[pairs].sum() for pairs in ranks) // max_tokens)
            print(
                f"{'shared' if share_prompt else 'twice':>10}{max_tokens:10}{costs.max() / costs.mean():22.4f}"
                f"{f'{len(plan.ranks[0])} of {least} needed':>16}{np.median(seconds) * 1e3:12.2f}{min(seconds) * 1e3:12.2f}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else LENGTHS)
