#!/usr/bin/env bash
# DPO on Qwen3-30B-A3B and Intel's orca_dpo_pairs, on 16 80-GB GPUs: two nodes of eight. ../common.sh describes the variables;
# on both nodes run
#
#   NNODES=2 NODE_RANK=(0 or 1) MASTER_ADDR=(the first node) bash scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh
#
# or start it once by ../../entrypoint/slurm.sh or ray-job.sh. The recipe is the published one (64 pairs a step, 4,096 tokens,
# constant learning rate 5e-8, 1,000 steps, router auxiliary loss 0.001), whose layout was TP 2 x PP 8 on 32 devices. Here
# the 128 experts are split over the eight GPUs of a node, whose links carry their tokens, and the layers over the two nodes.
# What each rank holds, without a GPU: bash scripts/training/dpo/run-qwen3-30B-A3B-orca-16xgpu.sh --dry-run --world-size 16
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

SAVE_DIR=${SAVE_DIR:-checkpoints}
EXP_NAME=${EXP_NAME:-qwen3-30B-A3B-orca-dpo}
NUM_GPUS=${NUM_GPUS:-8}
NUM_ROLLOUT=${NUM_ROLLOUT:-1000}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-64}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-8192}
LR=${LR:-5e-8}
SAVE_INTERVAL=${SAVE_INTERVAL:-100}
EVAL_INTERVAL=${EVAL_INTERVAL:-200}

use_environment
find_model Qwen/Qwen3-30B-A3B main
find_pairs data/orca/orca_rlhf.jsonl '' "hf download Intel/orca_dpo_pairs orca_rlhf.jsonl --repo-type dataset --local-dir data/orca"
set_launcher

SAVE_ARGS=(
    --async-save
    --keep-checkpoints 2
)
LOSS_ARGS=(
    --loss-type dpo
    --dpo-beta 0.1
    --moe-aux-loss-coeff 0.001
)
DATA_ARGS=(
    --conversation-key-map '{"system": "system", "question": "prompt"}'
    --preference-max-length 4096
    --preference-max-completion-length 2048
)
OPTIMIZER_ARGS=(
    --bf16
    --lr-decay-style constant
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --recompute-granularity full
    --recompute-method block
    --recompute-num-layers 12
)

launch "${SAVE_ARGS[@]}" "${LOSS_ARGS[@]}" "${DATA_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PARALLEL_ARGS[@]}" "$@"
