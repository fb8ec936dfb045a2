#!/usr/bin/env bash
# Make or reuse .venv, then lint, check types and run every test. Arguments go to pytest: `bash scripts/test.sh tests/unit -x`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment test

ruff check .
ruff format --check .
mypy

# Tests start processes of their own: one thread each, or they fight for the cores. Two files at a time, the long ones first.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
COVERAGE_ARGS=(--cov --cov-report=term)
(($#)) || COVERAGE_ARGS+=(--cov-fail-under=90) # a part of the tests covers a part of the code
python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "${COVERAGE_ARGS[@]}" "$@"
