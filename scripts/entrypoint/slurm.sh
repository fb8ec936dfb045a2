#!/usr/bin/env bash
# A run script as a Slurm job: one torchrun on each node, with NUM_GPUS processes (default: the GPUs that Slurm gives a node).
#
#   sbatch --nodes 2 --gpus-per-node 8 scripts/entrypoint/slurm.sh scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh [flags]
#
# Model, pairs, checkpoints and cache must be on file systems that all nodes share. Five minutes before the time limit Slurm
# sends SIGUSR1: the run saves and stops, and the same sbatch resumes it.
#SBATCH --job-name=relax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
set -euo pipefail

[[ -n ${SLURM_JOB_ID:-} && -f ${1:-} ]] || {
    echo "usage: sbatch --nodes N --gpus-per-node G scripts/entrypoint/slurm.sh RUN_SCRIPT [flags of the trainer]" >&2
    exit 2
}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
job=0000$SLURM_JOB_ID # the port is 2 and the last four digits of the job: no arithmetic, which runs what a text holds
export MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-2${job: -4}}
export NNODES=$SLURM_JOB_NUM_NODES NUM_GPUS=${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-0}}

# srun takes this shell's place, so that Slurm's signals reach the run scripts, and all of a node's CPUs for its one task.
# SLURM_NODEID is known inside a task only. A node that fails ends the others, which would wait for it.
exec srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --cpus-per-task "${SLURM_CPUS_ON_NODE:-1}" --cpu-bind none \
    --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' node "$@"
