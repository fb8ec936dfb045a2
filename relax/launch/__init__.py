"""torchrun, and the same on a Ray cluster, with the run's own end."""
