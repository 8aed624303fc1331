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
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from actors.learner.link.rendezvous import LearnerRanks, meet
from actors.learner.model.policy import whole
from actors.learner.update.ppo import PPOActor
from actors.runtime.process import leave
from areal_bus.weights.process_group import join_store, serve_store

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


def met(index: int, endpoint: str, size: int, replicas: int = 1, width: int = 1) -> LearnerRanks:
    """This rank's group. `width`: ranks that share each sequence. A single rank has no group."""
    if size == 1:
        return LearnerRanks()
    how: dict[str, Any] = {"replicas": replicas, "context_parallel": width, "timeout_s": 60.0}
    return meet(join_store(endpoint, 60.0), index=index, size=size, interface="lo", device="cpu", **how)


def write_weights(actor: PPOActor, path: Path) -> None:
    """Rank 0 writes the whole weights of the policy, and those of a critic as "v.NAME". A collective."""
    named = actor.policy.parameters()
    named |= {} if actor.critic is None else {f"v.{key}": one for key, one in actor.critic.model.parameters().items()}
    held = {name: whole(parameter).detach().clone() for name, parameter in named.items()}
    if actor.policy.ranks.index == 0:
        save_file(held, path)


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
