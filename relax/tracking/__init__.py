"""What a run shows: log, console, trackers, curves."""
