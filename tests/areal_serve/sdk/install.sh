#!/bin/bash
# Make .venv-tinker, the tinker SDK and its cookbook, with torch, for make test-tinker: install.sh PYTHON STAMP
# An environment of its own: the server is tested without a package of its client.
set -euo pipefail
python=$1 stamp=$2
sdk=.venv-tinker/bin/python

if [[ -z $python ]]; then
    echo "error: Python 3.11, 3.12 or 3.13 with venv is needed and was not found: install one, or run make tinker-sdk PYTHON=..." >&2
    exit 2
fi
[[ -x $sdk ]] || "$python" -m venv --clear .venv-tinker
"$sdk" -m pip --disable-pip-version-check install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
"$sdk" -m pip --disable-pip-version-check install --quiet 'tinker==0.38.*' 'tinker-cookbook[math-rl]==0.5.8' torch==2.13.0
touch "$stamp"
echo "Ready: make test-tinker"
