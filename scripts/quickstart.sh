#!/usr/bin/env bash
# From a fresh machine to a trained model in one command: an environment with pinned dependencies, SmolLM2-135M-Instruct,
# 255 real pairs, DPO with evaluation before and after on 44 held-out ones, a summary and curves. Run again, it resumes, or
# says that it is done. The variables of scripts/training/common.sh change any of it; NUM_GPUS defaults to 1 where there is
# a GPU, else to 0. Paths are relative to the project's root; arguments go to the trainer.
#
# The defaults are for two slow CPU cores. The length limits (192 tokens, 96 of them the answer) cut most answers: for speed
# only, so take a real run's limits from scripts/training/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
source scripts/training/common.sh
make_environment quickstart

if [[ -z ${HF_CHECKPOINT:-} ]]; then
    HF_CHECKPOINT=quickstart/SmolLM2-135M-Instruct
    if [[ ! -e $HF_CHECKPOINT ]]; then
        echo "model: downloading SmolLM2-135M-Instruct and converting it to $HF_CHECKPOINT"
        TQDM_DISABLE=1 python scripts/data/prepare_smollm2.py --output-dir "$HF_CHECKPOINT"
    fi
fi
if [[ -z ${PROMPT_DATA:-} && ! (-e quickstart/demo_train.jsonl && -e quickstart/demo_eval.jsonl) ]]; then
    echo "pairs: downloading 299 real preference pairs to quickstart/demo_{train,eval}.jsonl"
    python scripts/data/prepare_demo_pairs.py --output-dir quickstart
fi

SAVE_DIR=${SAVE_DIR:-quickstart/checkpoints}
EXP_NAME=${EXP_NAME:-quickstart}
NUM_GPUS=${NUM_GPUS:-$(python -c 'import torch; print(min(torch.cuda.device_count(), 1))')}
NUM_ROLLOUT=${NUM_ROLLOUT:-24}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-3}
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-4096}
LR=${LR:-1e-5}
SAVE_INTERVAL=${SAVE_INTERVAL:-12}
EVAL_INTERVAL=${EVAL_INTERVAL:-24}

use_environment
find_model HuggingFaceTB/SmolLM2-135M-Instruct main
find_pairs quickstart/demo_train.jsonl quickstart/demo_eval.jsonl \
    "python scripts/data/prepare_demo_pairs.py --output-dir quickstart"
set_launcher

RECIPE_ARGS=(
    --loss-type dpo
    --dpo-beta 0.1
    --preference-max-length 192
    --preference-max-completion-length 96
    --keep-checkpoints 1
    --save-hf "$SAVE_DIR/$EXP_NAME-hf"
)
# Updates of 24 steps are smaller than what bf16 weights can show (held-out loss fell a fifth as far); a CPU has time for fp32.
((NUM_GPUS)) || RECIPE_ARGS+=(--no-bf16)

# The tracker is written when a checkpoint is whole, the curves after the last evaluation.
tracker=$SAVE_DIR/$EXP_NAME/latest_checkpointed_iteration.txt trained=0
[[ ! -f $tracker ]] || trained=$(head -c 64 "$tracker" | tr -d '\0')
is_whole 0 "$trained" || fail "$tracker must hold a step, not ${trained@Q}: remove the file to go on from the newest checkpoint"
if ((trained >= NUM_ROLLOUT)) && [[ -e log/$EXP_NAME/curves.png ]]; then
    python -m relax.report "log/$EXP_NAME.jsonl"
    echo "Done already: $SAVE_DIR/$EXP_NAME has all $NUM_ROLLOUT steps. Raise NUM_ROLLOUT to go on, or set EXP_NAME for a new run."
else
    ((NUM_GPUS)) && place="$NUM_GPUS GPU" || place="the CPU"
    echo "training: DPO, $NUM_ROLLOUT steps of $GLOBAL_BATCH_SIZE pairs on $place"
    launch "${RECIPE_ARGS[@]}" "$@"
fi
echo "Curves: log/$EXP_NAME/curves.png   Metrics: log/$EXP_NAME.jsonl   Model: $SAVE_DIR/$EXP_NAME-hf"
