# Sourced from the project's root. `make_environment EXTRA` makes .venv with the pinned dependencies, or reuses it while
# pyproject.toml and constraints.txt are the ones that it was made from, and puts it first on PATH.
#
# PYTHON names the interpreter to make it with. pip's own variables hold; on a machine without a GPU,
# PIP_EXTRA_INDEX_URL=(PyTorch's index of CPU wheels) saves gigabytes of CUDA libraries.

make_environment() {
    local extra=$1 python=${PYTHON:-python3} stamp
    stamp=.venv/relax-$extra-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
    if [[ ! -e $stamp ]]; then
        if [[ ! -x .venv/bin/pip ]]; then
            if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
                echo "relax needs Python 3.11 or newer, and $python is not: set PYTHON to one that is" >&2
                return 2
            fi
            "$python" -m venv .venv
        fi
        echo "environment: installing relax[$extra] and its pinned dependencies into .venv; the first time, torch takes minutes"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extra]"
        touch "$stamp"
    fi
    export PATH=$PWD/.venv/bin:$PATH
}
