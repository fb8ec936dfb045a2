"""SIGTERM, SIGINT and SIGUSR1 end a run in order: the step is finished and saved, and the exit code is 128 + the signal.

Schedulers, terminals and launchers send a signal several times over: to the process, to its group, and forwarded. Invariant:
the first one counts. Whatever comes after it waits for nothing and ends nothing, up to the process's last moment (see
`command.run_command`); SIGQUIT and SIGKILL still end a run at once.
"""

import os
import signal
from types import FrameType

import torch

from relax.backend.parallel import any_rank
from relax.cli.command import STOPS


class StopSignal:
    """Notes the first signal from its creation on."""

    def __init__(self) -> None:
        self.number = 0
        self._told = os.environ.get("RANK", "0") != "0"
        for kind in STOPS:
            signal.signal(kind, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
        elif not self._told:
            self._told = True
            text = f"relax: stopping by signal {self.number}, after this step and its checkpoint; SIGQUIT ends it at once\n"
            os.write(2, text.encode())  # the stream itself may not be written to while it is being written to

    def on_any_rank(self, device: torch.device) -> int:
        """The signal that some rank has received, 0 if none has: the same answer on every rank."""
        return any_rank(self.number, device)
