"""`python -m tests.faults [PART ...]`: the whole harness, or parts of it; exit code 0 where nothing was lost.

Prints a table row for each place where a fault struck: how the command ended, how often, in how many seconds with its resume.
"""

import sys
import time
from collections import Counter

from tests.faults.harness import bench
from tests.faults.parts import PARTS


def main(names: list[str]) -> int:
    """Run the parts; how many trials lost something."""
    wrong = 0
    print("| part | where | how it ended | times | seconds |\n| --- | --- | --- | ---: | ---: |", flush=True)
    with bench() as made:
        for name in names or PARTS:
            times: Counter[tuple[str, str]] = Counter()
            seconds: dict[tuple[str, str], float] = {}
            for where, trial in PARTS[name](made, False):
                start = time.monotonic()
                try:
                    ended = trial()
                except (AssertionError, TimeoutError) as error:
                    print(f"{name}: {where}: {str(error)[-600:]}", file=sys.stderr, flush=True)
                    ended, wrong = "LOST", wrong + 1
                times[where, ended] += 1
                seconds[where, ended] = seconds.get((where, ended), 0.0) + time.monotonic() - start
            for (where, ended), count in times.items():
                print(f"| {name} | {where} | {ended} | {count} | {seconds[where, ended]:.0f} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
