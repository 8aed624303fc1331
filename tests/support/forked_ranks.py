"""Learner ranks as forks of one process, which imports what they need once."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from actors.runtime.process import leave
from areal_bus.weights.process_group import serve_store

PATIENCE_S = 600.0  # a loaded machine

Stage = Mapping[str, Any]  # "size" of the group, and further arguments of the function


def run_ranks(module: str, name: str, *stages: Stage) -> None:
    """Call MODULE.NAME(index=, endpoint=, **stage) on each of the `size` ranks of each stage, one stage at a time."""
    stores = [serve_store("127.0.0.1") for _ in stages]
    told = [{**stage, "endpoint": endpoint} for stage, (_, endpoint) in zip(stages, stores, strict=True)]
    line = [sys.executable, "-m", "tests.support.forked_ranks", module, name, json.dumps(told)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all forks have ended
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors


def _run(module: str, name: str, stages: Sequence[dict[str, Any]]) -> int:
    import torch

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    for stage in stages:
        children = []
        for index in range(stage["size"]):
            pid = os.fork()
            if not pid:
                try:
                    function(index=index, **stage)
                except BaseException:  # noqa: BLE001 (a fork never returns to the loop above)
                    traceback.print_exc()
                    leave(1)
                leave(0)
            children.append(pid)
        ends = [os.waitpid(pid, 0)[1] for pid in children]
        if any(ends):
            return 1
    return 0


if __name__ == "__main__":
    leave(_run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
