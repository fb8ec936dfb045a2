"""One of two ranks, where a collective operation may take two seconds and rank 0 works for four; see test_torchrun.py."""

import time

import torch
import torch.distributed as dist

from relax.backend import parallel

parallel.initialize(parallel.ParallelConfig(), device=torch.device("cpu"), seed=0, timeout_minutes=2 / 60)
parallel.main_rank_first(lambda first: time.sleep(4 if dist.get_rank() == 0 else 0))
print("done")
parallel.shutdown()
