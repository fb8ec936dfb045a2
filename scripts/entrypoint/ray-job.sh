#!/usr/bin/env bash
# A run script on a Ray cluster, through Ray Train: NNODES x NUM_GPUS workers, one GPU each (NUM_GPUS=0: one CPU worker a node).
#
#   pip install -c constraints.txt '.[ray]'                            # on every node, at the same path
#   ray start --head                                                  # on the first node
#   ray start --address FIRST:6379                                    # on the others
#   NNODES=2 NUM_GPUS=8 bash scripts/entrypoint/ray-job.sh scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh [flags]
#
# From outside the cluster: ray job submit --address http://FIRST:8265 -- env NNODES=2 NUM_GPUS=8 bash ... as above. Model,
# pairs, checkpoints and cache must be on file systems that all nodes share. Without a cluster Ray starts one on this machine.
# SIGTERM, SIGINT and SIGUSR1 save and stop the run; the same command resumes it.
set -euo pipefail

[[ -f ${1:-} ]] || {
    echo "usage: bash scripts/entrypoint/ray-job.sh RUN_SCRIPT [flags of the trainer]" >&2
    exit 2
}
export LAUNCH_ON=ray
exec bash "$@"
