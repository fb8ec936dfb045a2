"""One rank of test_logprobs_ranks.py: log-probs and gradients over this rank's rows of the vocabulary."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from relax.backend.model.logprobs import target_logprobs
from relax.backend.ops import choose_ops


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for name, case in torch.load(directory / "cases.pt").items():
        shard = case["weight"].chunk(dist.get_world_size())[rank]
        hidden, weight = (x.clone().requires_grad_() for x in (case["hidden"], shard))
        values = target_logprobs(
            hidden,
            weight,
            case["targets"],
            ops=choose_ops(torch.device("cpu"), hidden.dtype, head_dim=8),
            vocab_size=case["vocab_size"],
            group=dist.group.WORLD,
            chunk=case["chunk"],
        )
        grads = torch.autograd.grad(values, (hidden, weight), case["grad"].to(values.dtype))
        results[name] = [values.detach(), *grads]
    torch.save(results, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
