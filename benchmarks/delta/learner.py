"""The learner's side of the bench `delta`: updates of a real policy by AdamW, and pushes in both forms."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model
from actors.runtime.context import HeartbeatState
from actors.runtime.process import leave
from areal_bus.config.capacity import BUCKET_BYTES, DELTA_VERSIONS
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.messages import PushBegin
from areal_bus.storage.journal import Journal
from areal_bus.weights.delta import ChangeHistory, blocks
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from benchmarks.harness.worker_main import serve
from benchmarks.push.learner import demo_prompts, made_up

N_PROMPTS, LONGEST = 8, 8  # of a step; tokens of the longest completion
FULL, DELTA = "full", "delta"

opened: list["DeltaLearner"] = []  # one a process


class DeltaLearner:
    """A learner rank without the bus: float32 weights, snapshots in bfloat16."""

    def __init__(self, config: Config, model: str, folder: Path, address: str) -> None:
        self._config = config
        store, self.endpoint = serve_store(address)
        self._history = ChangeHistory(DELTA_VERSIONS)
        self._history.start()
        self._roots = {
            form: WeightSender(store, interface="", address=address, route="gloo", changes=changes)
            for form, changes in ((FULL, None), (DELTA, self._history))
        }
        policy = Policy(load_model(model, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0)
        journal = Journal(Path(tempfile.mkdtemp()) / "journal", role="learner", index=0, incarnation=0)
        self._actor = PPOActor(policy, config, UpdateContext(journal, HeartbeatState(), Path(tempfile.mkdtemp())))
        self._prompts = demo_prompts(config, model, folder)
        self._kept: list[Snapshot] = []
        self._digests: list[str] = []

    def snapshot(self) -> dict[str, float]:
        """Take the snapshot of this version, and wait until it is compared with the one before."""
        spare = self._kept.pop(0) if len(self._kept) > 1 else None
        began = time.monotonic()
        taken = take_snapshot(
            self._actor.version,
            self._actor.policy.parameters(),
            previous=spare,
            bucket_bytes=BUCKET_BYTES,
            dtype=torch.bfloat16,
        )
        if taken is None:
            raise RuntimeError("take_snapshot must return a snapshot at the root of a push")
        snapshot_s, cpu = time.monotonic() - began, time.process_time()
        if self._kept:
            self._history.follow(self._kept[-1], taken)
            self._history.settle()
        self._kept.append(taken)
        self._digests.append(taken.digest)
        return {"snapshot_s": snapshot_s, "compare_cpu_s": time.process_time() - cpu, "full_bytes": taken.n_bytes}

    def update(self) -> None:
        """One step on prompts that the last one did not have."""
        clock, n_samples, at = self._actor.version, self._config.gconfig.n_samples, self._actor.version * N_PROMPTS
        prompts = [self._prompts[(at + i) % len(self._prompts)] for i in range(N_PROMPTS)]
        shard = made_up(prompts, n_samples, LONGEST, clock)
        batch = build(shard, step=clock, clock=clock, n_groups=len(prompts), eta=1, n_samples=n_samples)
        self._actor.ppo_update(self._actor.compute_advantages_and_returns(batch))

    def changes(self, behind: int) -> dict[str, float]:
        """Of a delta from so many versions ago: bytes and changed numbers."""
        delta = self._history.delta(self._kept[-1], {self._digests[-1 - behind]})
        if delta is None:
            raise RuntimeError(f"a delta from {behind} versions ago must be smaller than all bytes")
        table = delta.payload.numpy()[: 8 * len(blocks(self._kept[-1].layout.entries))].view("<u4")
        return {"bytes": len(delta.payload), "changed": int(table[::2].sum())}

    def push(self, form: str, begin: Mapping[str, Any]) -> dict[str, Any]:
        done = self._roots[form].push(self._kept[-1], PushBegin(**begin))
        return {"seconds": done.receive_s, "bytes": done.sent_bytes, "digest": done.digest}


def open_learner(config: str, model: str, address: str, lr: float) -> dict[str, Any]:
    opened.clear()  # the memory of the one before
    changes = ["actor.lr_schedule=constant", "actor.lr_warmup_steps=0", f"actor.lr={lr}"]
    opened[:] = [DeltaLearner(load(Path(config), changes, {}), model, Path(config).parent, address)]
    return {"endpoint": opened[0].endpoint}


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "open": open_learner,
    "update": lambda: opened[0].update(),
    "snapshot": lambda: opened[0].snapshot(),
    "changes": lambda behind: opened[0].changes(behind),
    "push": lambda form, begin: opened[0].push(form, begin),
}
torch.set_num_threads(1)

if __name__ == "__main__":
    serve(FUNCTIONS)
    leave(0)
