#!/usr/bin/env bash
# Tokenize a data set once: preprocess_data.sh NAME [--key value ...] reads configs/datasets/NAME.yaml; a flag wins over its
# key. Paths in the file are relative to where you are.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$root/scripts/training/common.sh"

name=${1:-}
config=$root/configs/datasets/$name.yaml
known=$(cd "$root/configs/datasets" && printf '%s ' *.yaml)
[[ -n $name && -f $config ]] || fail "usage: preprocess_data.sh NAME [--key value ...], NAME one of: ${known//.yaml/}"
use_environment
exec python -m relax.preprocess --config "$config" "${@:2}"
