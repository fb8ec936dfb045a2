"""`python -m relax.launch FLAGS -m relax.train ...`: torchrun with its flags, but the run's own exit code and one plain line.

torchrun answers any end of a rank but 0 with its own traceback and exit code 1. Invariants:
- The exit code is that of the rank which ended the run: 2 for a user's error, 128 + n for a signal.
- A rank that said itself why it ended (a user's error, an orderly stop, another rank's end) is not spoken for; of any other
  the last line tells its number, its machine and how it ended.
- Of several signals the ranks get the first, and have all of --shutdown-timeout to save: torchrun by itself would end at the
  second one, and leave its ranks behind.
"""

import logging
import signal
import socket
import sys
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from relax.cli.command import LOST, STOPS, ignore_stops


class FirstSignal(SignalException):
    """What torchrun's handler raises in its place: no handler raises another one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        for kind in (*STOPS, signal.SIGHUP):  # a closed terminal, too, which torchrun hears by default
            signal.signal(kind, lambda number, frame: None)
        super().__init__(*arguments, **options)


def main() -> None:
    """Run torchrun; end as the first rank that failed did."""
    logging.disable(logging.ERROR)  # it would tell of each process that it stops because of the first
    api.SignalException = FirstSignal  # type: ignore[misc]  # torchrun offers no other way
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        end(rank, failure.exitcode, host=socket.gethostname())
    except SignalException as stopped:
        sys.exit(128 + int(stopped.sigval))
    finally:
        ignore_stops()


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure behind the others: the others lost their connection to that rank, or were stopped because of it."""
    return min(failures.items(), key=lambda item: (precedence(item[1].exitcode), item[1].timestamp))


def precedence(code: int) -> int:
    """How likely it is that a rank with this exit code (-n: killed by signal n) ended the others; 0 is the likeliest."""
    if code < 0 and code != -signal.SIGTERM:
        return 0
    return 2 if code == LOST or code < 0 or code > 128 else 1


def end(rank: int, code: int, *, host: str) -> NoReturn:
    """Exit as a rank did; code: its exit code, -n where signal n killed it."""
    if code == 1:
        reason = "ended with exit code 1"
    elif code < 0:
        cause = ", as by a machine that runs out of memory" if code == -signal.SIGKILL else ""
        reason = f"was killed by signal {-code} ({signal.Signals(-code).name}){cause}"
    else:
        sys.exit(1 if code == LOST else code)
    print(f"relax: rank {rank} on {host} {reason}", file=sys.stderr, flush=True)
    sys.exit(128 - code if code < 0 else code)
