#!/bin/bash
# Trains `tiny` for three steps from a wheel with each of Python 3.12 and 3.13 that is here: smoke_pythons.sh [VERSION ...]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1
unset PYTHONPATH VIRTUAL_ENV

# The first interpreter of this version that starts and makes environments: on the path, of pyenv, of uv.
find_python() {
    local found
    for found in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/"python$1" "$(uv python find "$1" 2>/dev/null)"; do
        if "$found" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$found"
            return
        fi
    done
}

smoke() {
    local version=$1 python=$2 venv=$work/$1/venv
    mkdir -p "$work/$version"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint "$root/constraints.txt" torch
    "$venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/$version" "$work/source"
    "$venv/bin/pip" install --quiet --constraint "$root/constraints.txt" "$work/$version"/*.whl
    cd "$work/$version" # outside of the checkout, so that the wheel's packages are imported
    "$venv/bin/areal-bus" run tiny -np 3 --set run.total_train_steps=3 --set learner.warmup.steps=5 >out.txt 2>&1 ||
        { cat out.txt; echo "error: Python $version: training failed"; return 1; }
    grep -q '^done: 3 versions' out.txt || { cat out.txt; echo "error: Python $version: the run did not end"; return 1; }
    "$venv/bin/areal-bus" audit runs/tiny >audit.txt || { cat audit.txt; return 1; }
    echo "$("$venv/bin/python" -V): a wheel trained tiny for three steps, and its journal keeps the invariants"
}

mkdir "$work/source" # a copy: building leaves files
git -C "$root" ls-files -z | tar -C "$root" --null --files-from=- --create | tar -C "$work/source" --extract
[[ $# -gt 0 ]] || set -- 3.12 3.13
for version; do
    python=$(find_python "$version")
    if [[ -n $python ]]; then
        smoke "$version" "$python"
    else
        echo "skipped: there is no Python $version that makes environments on the path, under ~/.pyenv or in uv"
    fi
done
