# Sourced by the run scripts: their inputs, and how the trainer starts and stops. Paths are relative to where you are.
#
# Environment of every run script:
#   HF_CHECKPOINT                     model directory; or MODEL_DIR, which holds it, with MODEL_REVISION
#   PROMPT_DATA, EVAL_PROMPT_DATA     pairs to train on and to evaluate on (empty: no evaluation)
#   SAVE_DIR, EXP_NAME                checkpoints go to SAVE_DIR/EXP_NAME, logs to log/EXP_NAME*; the same command resumes
#   NUM_GPUS                          processes on each node, one GPU each; 0 means one process on the CPU
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   for more than one node: the same command on each, NODE_RANK 0 at MASTER_ADDR;
#                                     ../entrypoint/slurm.sh and ../entrypoint/ray-job.sh set them
#   NUM_ROLLOUT, GLOBAL_BATCH_SIZE, MAX_TOKENS_PER_GPU, LR, SAVE_INTERVAL, EVAL_INTERVAL
#
# A run script gives them its defaults and adds what its recipe is.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# is_whole LEAST TEXT: whether it is a whole number from LEAST to 999999999. Every number from outside comes through here before
# arithmetic, which runs the commands in a text such as x[$(command)0].
is_whole() {
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ && $2 -ge $1 ]]
}

# whole_numbers LEAST NAME...: fail unless each of these variables holds one.
whole_numbers() {
    local least=$1 name value
    for name in "${@:2}"; do
        value=${!name-}
        is_whole "$least" "$value" || fail "$name=${value@Q} must be a whole number, at least $least"
    done
}

# The environment in use if torch is in it, else the project's .venv.
use_environment() {
    local root
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    if ! python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
        [[ -x $root/.venv/bin/python ]] || fail "no Python with torch: activate one, or run bash $root/scripts/test.sh"
        export PATH=$root/.venv/bin:$PATH
    fi
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
}

# find_model REPOSITORY REVISION: HF_CHECKPOINT, or the model in MODEL_DIR (itself, a directory of models, or a hub cache).
find_model() {
    local repository=$1 revision=${MODEL_REVISION:-$2} directory=${MODEL_DIR:-models} candidate
    local by_name=$directory/${repository#*/} cached=$directory/models--${repository/\//--}/snapshots/$revision
    if [[ -z ${HF_CHECKPOINT:-} ]]; then
        for candidate in "$cached" "$by_name" "$directory"; do
            [[ -e $candidate/config.json ]] && HF_CHECKPOINT=$candidate && break
        done
        [[ -n ${HF_CHECKPOINT:-} ]] || fail "no model: set HF_CHECKPOINT to its directory, or run" \
            "hf download $repository --revision $revision --local-dir $by_name"
    fi
    [[ -e $HF_CHECKPOINT/config.json ]] || fail "HF_CHECKPOINT=$HF_CHECKPOINT has no config.json"
}

# find_pairs TRAIN EVAL COMMAND: the defaults of PROMPT_DATA and EVAL_PROMPT_DATA, and what makes them; your own training pairs
# come without EVAL.
find_pairs() {
    local path
    if [[ -z ${PROMPT_DATA:-} ]]; then
        PROMPT_DATA=$1
        EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA-$2}
    fi
    EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-}
    for path in "$PROMPT_DATA" ${EVAL_PROMPT_DATA:+"$EVAL_PROMPT_DATA"}; do
        [[ -e $path || -e ${path}_packed_chosen_input_ids_document.idx ]] ||
            fail "no pairs at $path: set PROMPT_DATA and EVAL_PROMPT_DATA, or run $3"
    done
}

# set_launcher: LAUNCHER starts the trainer (under torchrun where there are several processes), RUN_ARGS are the flags that
# the variables stand for.
set_launcher() {
    local processes
    NNODES=${NNODES:-1} MASTER_PORT=${MASTER_PORT:-29500}
    whole_numbers 0 NUM_GPUS ${NODE_RANK:+NODE_RANK}
    whole_numbers 1 NNODES MASTER_PORT NUM_ROLLOUT GLOBAL_BATCH_SIZE MAX_TOKENS_PER_GPU SAVE_INTERVAL EVAL_INTERVAL
    RUN_ARGS=(
        --hf-checkpoint "$HF_CHECKPOINT"
        --load "$SAVE_DIR/$EXP_NAME"
        --save "$SAVE_DIR/$EXP_NAME"
        --save-interval "$SAVE_INTERVAL"
        --prompt-data "$PROMPT_DATA"
        ${EVAL_PROMPT_DATA:+--eval-prompt-data "$EVAL_PROMPT_DATA" --eval-interval "$EVAL_INTERVAL"}
        --num-rollout "$NUM_ROLLOUT"
        --global-batch-size "$GLOBAL_BATCH_SIZE"
        --max-tokens-per-gpu "$MAX_TOKENS_PER_GPU"
        --lr "$LR"
        --device "$( ((NUM_GPUS)) && echo cuda || echo cpu)"
        --exp-name "$EXP_NAME"
    )
    processes=$((NUM_GPUS ? NUM_GPUS : 1))
    LAUNCHER=(python)
    if [[ ${LAUNCH_ON:-} == ray ]]; then
        LAUNCHER+=(-m relax.launch.on_ray --num-workers "$((NNODES * processes))")
        ((NUM_GPUS == 0)) || LAUNCHER+=(--use-gpu)
        return
    fi
    ((NNODES * processes > 1)) || return 0
    # A worker has two minutes to finish its step and save when a signal comes.
    LAUNCHER+=(-m relax.launch --nnodes "$NNODES" --nproc-per-node "$processes"
        --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 120)
    if ((NNODES == 1)); then
        LAUNCHER+=(--standalone)
    else
        [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] || fail "NNODES=$NNODES needs NODE_RANK and MASTER_ADDR on every node"
        LAUNCHER+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    fi
}

# launch FLAGS...: train by RUN_ARGS and FLAGS, with a copy of the output in log/EXP_NAME-<time>.log, one for each node. The
# status is the trainer's own. SIGTERM, SIGINT and SIGUSR1 are passed on to it, so that it saves and stops; a closed terminal
# counts as SIGTERM.
launch() {
    local log code=0 status trainer='' signalled='' writer
    [[ " $* " != *' --dry-run '* ]] || LAUNCHER=(python) # it plans for all ranks in one process
    log=log/$EXP_NAME-$(date +%Y%m%d-%H%M%S)${NODE_RANK:+-node$NODE_RANK}.log
    mkdir -p log
    exec 3> >(trap '' HUP INT TERM USR1; exec tee "$log") # outlives the signals, or the trainer loses its output
    writer=$!
    echo "Logging to $log" >&3
    trap 'forward TERM' TERM HUP
    trap 'forward INT' INT
    trap 'forward USR1' USR1
    set -m # a process group of its own: Ctrl-C reaches the trainer once, through this script
    "${LAUNCHER[@]}" -m relax.train "${RUN_ARGS[@]}" "$@" </dev/null >&3 2>&1 &
    trainer=$!
    set +m
    while :; do # a signal ends `wait` early; 127 means that the trainer's status was taken before
        signalled='' status=0
        wait "$trainer" 2>/dev/null || status=$?
        ((status == 127)) || code=$status
        [[ -n $signalled && $status != 127 ]] || break
    done
    trap '' TERM HUP INT USR1 # the status is the trainer's, whatever comes while the log is closed
    exec 3>&-
    wait "$writer" || true
    return "$code"
}

forward() {
    signalled=$1
    [[ -z $trainer ]] || kill -s "$1" "$trainer" 2>/dev/null || true
}
