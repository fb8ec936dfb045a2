"""`--profile`: a torch profiler trace of a few steps, for chrome://tracing or Perfetto."""

from pathlib import Path

from torch.profiler import profile


class StepProfiler:
    """Records the steps [first, last) of this rank into one trace file."""

    def __init__(self, path: Path, *, first: int, last: int) -> None:
        self.path, self.first, self.last = path, first, last
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start where the range begins, stop where it has ended; call before each step."""
        if step == self.first:
            self._profile = profile(record_shapes=True, profile_memory=True)
            self._profile.start()
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if the range was entered."""
        if self._profile is None:
            return
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        self._profile = None
