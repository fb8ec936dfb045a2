#!/usr/bin/env bash
# Parity and speed on whatever GPU is there, in under six minutes: bash benchmarks/gpu_check.sh [--output results.json]
# Uses the Python on PATH if torch is in it, else the project's .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/training/common.sh
use_environment
nvidia-smi || true
exec timeout 360 python benchmarks/gpu_check.py --device cuda "$@"
