#!/bin/bash
# Make .venv-sglang, a real SGLang server on CPU for make test-sglang: install.sh PYTHON STAMP
# An environment of its own: its pins conflict with ours. SGLang is made for GPUs: its CUDA packages are left out, and two
# small shims stand for what it imports of them (shims/ says why).
set -euo pipefail
python=$1 stamp=$2
here=$(dirname "$0")
server=.venv-sglang/bin/python

if [[ -z $python ]]; then
    echo "error: Python 3.11, 3.12 or 3.13 with venv is needed and was not found: install one, or run make sglang-cpu PYTHON=..." >&2
    exit 2
fi
[[ -x $server ]] || "$python" -m venv --clear .venv-sglang
pip() { "$server" -m pip --disable-pip-version-check "$@"; }

# First and pinned, so that nothing after it brings another build.
if ! "$server" -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
    echo "Downloading torch into .venv-sglang"
    pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
fi
echo "Downloading SGLang and what it imports into .venv-sglang: 3.3 GB on disk"
pip install --quiet --constraint "$here/constraints.txt" --requirement "$here/requirements.txt"
pip install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7
site=$("$server" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$here"/shims/. "$site/"
touch "$stamp"
echo "Ready: make test-sglang"
