"""SIGTERM, SIGINT and SIGUSR1 end a run in order: the step is finished and saved, and the exit code is 128 + the signal."""

import signal
from types import FrameType

import torch

from relax.backend.parallel import any_rank


class StopSignal:
    """Notes the signals from its creation on; a second one of the same kind acts as usual, for a user who will not wait."""

    def __init__(self) -> None:
        self.number = 0
        for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(kind, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def on_any_rank(self, device: torch.device) -> int:
        """The signal that some rank has received, 0 if none has: the same answer on every rank."""
        return any_rank(self.number, device)
