#!/bin/bash
# Make .venv-peers, what the benches are measured against: install.sh PYTHON cpu|cuda STAMP
# An environment of its own: the peers' pins conflict with ours and with each other's. areal and verl come without their
# dependencies: only single modules of theirs are measured, and requirements.txt has what those import.
set -euo pipefail
python=$1 torch=$2 stamp=$3
here=$(dirname "$0")
peer=.venv-peers/bin/python

if [[ -z $python ]]; then
    echo "error: Python 3.11, 3.12 or 3.13 with venv is needed and was not found: install one, or run make bench-peers PYTHON=..." >&2
    exit 2
fi
[[ -x $peer ]] || "$python" -m venv --clear .venv-peers
pip() { "$peer" -m pip --disable-pip-version-check "$@"; }

# First and pinned, so that nothing after it brings another build.
if ! "$peer" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
    echo "Downloading torch into .venv-peers (TORCH=$torch)"
    pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
fi
echo "Downloading the peers into .venv-peers: about 300 MB"
pip install --quiet --constraint <(echo torch==2.13.0) --requirement "$here/requirements.txt"
pip install --quiet --no-deps areal==1.0.4 verl==0.9.1
touch "$stamp"
echo "Ready: python -m benchmarks --list"
