#!/usr/bin/env bash
# DPO on Qwen3-0.6B and 4,096 UltraFeedback pairs, on one GPU. ../common.sh describes the variables;
# arguments go to the trainer: `bash scripts/training/dpo/run-qwen3-0.6B-ultrafeedback-1xgpu.sh --dpo-beta 0.2`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

SAVE_DIR=${SAVE_DIR:-checkpoints}
EXP_NAME=${EXP_NAME:-qwen3-0.6B-ultrafeedback-dpo}
NUM_GPUS=${NUM_GPUS:-1}
NUM_ROLLOUT=${NUM_ROLLOUT:-200}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-32}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-8192}
LR=${LR:-5e-7}
SAVE_INTERVAL=${SAVE_INTERVAL:-50}
EVAL_INTERVAL=${EVAL_INTERVAL:-200}

use_environment
find_model Qwen/Qwen3-0.6B c1899de289a04d12100db370d81485cdf75e47ca
find_pairs data/ultrafeedback/ultrafeedback_train.jsonl data/ultrafeedback/ultrafeedback_eval.jsonl \
    "python scripts/data/prepare_ultrafeedback_preferences.py --output-dir data/ultrafeedback"
set_launcher

LOSS_ARGS=(
    --loss-type dpo
    --dpo-beta 0.1
)
DATA_ARGS=(
    --preference-max-length 1024
    --preference-max-completion-length 512
)
OPTIMIZER_ARGS=(
    --bf16
    --min-lr 0
    --lr-decay-style cosine
    --weight-decay 0
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
)

launch "${LOSS_ARGS[@]}" "${DATA_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "$@"
