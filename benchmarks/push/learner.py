"""The learner's side of the bench `push`: steps of a real policy during the production push."""

import array
import queue
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.data.loading import load_rows
from actors.learner.batching import build
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.link.weight_pusher import WeightPusher
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor, UpdateContext
from actors.models.loading import load_model, load_tokenizer
from actors.runtime.context import HeartbeatState
from actors.runtime.process import leave
from actors.workflows.prompts import prompt_ids, prompt_of
from areal_bus.config.capacity import BUCKET_BYTES
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.messages import Message, PushBegin, PushBroken, PushDone, ShardItem
from areal_bus.storage.journal import Journal
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.route import Route
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from benchmarks.harness.worker_main import seconds, serve

ADDRESS, INTERFACE = "127.0.0.1", "lo"
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class PushLearner:
    """A learner rank without the bus. `wire` is the dtype of pushed weights, `route` their transport."""

    actor: PPOActor
    pusher: WeightPusher
    ended: queue.SimpleQueue[Message]  # results of pushes
    prompts: list[list[int]]
    config: Config
    wire: torch.dtype
    route: Route
    longest: int  # tokens of the longest completion
    store: Any
    endpoint: str
    member: str

    def snapshot(self, version: int) -> Snapshot:
        """Take a snapshot as the learner does, on the step's thread. The pusher keeps one snapshot a version."""
        taken = take_snapshot(
            version,
            self.actor.policy.parameters(),
            previous=self.pusher.spare(),
            bucket_bytes=BUCKET_BYTES,
            dtype=self.wire,
            shared_on=self.actor.policy.shared_on("private" if self.route == "gloo" else "host"),
        )
        if taken is None:
            raise RuntimeError("take_snapshot must return a snapshot at the root of a push")
        self.pusher.keep(taken)
        return taken

    def push(self, number: int) -> None:
        """Start a push of version `number`; `await_push` waits for its end."""
        taken = self.snapshot(number)
        self.pusher.begin(PushBegin(number, taken.version, 0, [self.member], self.endpoint, WAIT_S))

    @property
    def n_bytes(self) -> int:
        """Bytes of one push."""
        return sum(p.numel() for p in self.actor.policy.parameters().values()) * self.wire.itemsize

    def await_push(self) -> PushDone:
        ended = self.ended.get(timeout=WAIT_S)
        if not isinstance(ended, PushDone):
            raise RuntimeError(f"every push must arrive: {ended.error if isinstance(ended, PushBroken) else ended}")
        return ended

    def update(self) -> None:
        """One step, always on the same tokens."""
        clock, n_samples = self.actor.version, self.config.gconfig.n_samples
        shard = made_up(self.prompts, n_samples, self.longest, clock)
        batch = build(shard, step=clock, clock=clock, n_groups=len(self.prompts), eta=1, n_samples=n_samples)
        self.actor.ppo_update(self.actor.compute_advantages_and_returns(batch))


opened: list[PushLearner] = []  # one a process


def open_learner(
    config: str, model: str, member: str, wire: str, route: Route, n_prompts: int, longest: int
) -> dict[str, Any]:
    """Load the policy. Returns the store's endpoint for the member, and the prompts of the demo."""
    settings = load(Path(config), ["actor.lr_schedule=constant", "actor.lr_warmup_steps=0"], {})
    store, endpoint = serve_store(ADDRESS)
    root = WeightSender(store, interface=INTERFACE, address=ADDRESS, route=route)
    ended: queue.SimpleQueue[Message] = queue.SimpleQueue()
    broken: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    folder = Path(tempfile.mkdtemp())
    policy = Policy(load_model(model, "float32", "cpu"), ranks=LearnerRanks(), device="cpu", temperature=1.0)
    actor = PPOActor(
        policy,
        settings,
        UpdateContext(Journal(folder / "journal", role="learner", index=0, incarnation=0), HeartbeatState(), folder),
    )
    pusher = WeightPusher(root.push, send=ended.put, failed=broken.put)
    prompts = demo_prompts(settings, model, Path(config).parent)
    dtype = getattr(torch, wire)
    steps = prompts[:n_prompts]
    opened[:] = [PushLearner(actor, pusher, ended, steps, settings, dtype, route, longest, store, endpoint, member)]
    return {"endpoint": endpoint, "prompts": prompts}


def demo_prompts(config: Config, model: str, folder: Path) -> list[list[int]]:
    """Prompts of one batch, as token ids."""
    tokenizer = load_tokenizer(model)
    rows = load_rows(config, folder)[: config.data.batch_size]
    return [prompt_ids(prompt_of(row, config.data), config.data, tokenizer) for row in rows]


def made_up(prompts: list[list[int]], n_samples: int, most: int, clock: int) -> list[ShardItem]:
    """Samples of a batch: 2 to `most` random tokens each. The rewards of a group differ."""
    dice, shard = random.Random(0), []
    for uid, prompt in enumerate(prompts):
        for sample in range(n_samples):
            n = dice.randint(2, most)
            ids = [*prompt, *dice.choices(prompt, k=n)]
            shard.append(ShardItem(
                step=clock, clock=clock, group=uid, n_groups=len(prompts), uid=uid, sample=sample,
                reward=sample / n_samples, correct=None, finish="stop", segments=[[len(prompt), n]],
                spans=[[clock, n]], ids=array.array("i", ids).tobytes(),
                logps=array.array("f", [-4.0] * n).tobytes(), text="",
            ))  # fmt: skip
    return shard


def step(number: int, with_push: bool) -> dict[str, float]:
    """One step while the generator decodes, with or without a push that starts at the same time."""
    learner = opened[0]
    learner.store.wait([f"decodes/{number}"])
    wall, cpu = time.monotonic(), time.process_time()
    if with_push:
        learner.push(number)
    learner.update()
    took = time.monotonic() - wall
    done = learner.await_push() if with_push else None
    found = {"seconds": took, "cpu_s": time.process_time() - cpu, "push_s": done.receive_s if done else 0.0}
    learner.store.set(f"over/{number}", "")
    return found


def push(number: int) -> dict[str, float]:
    """A push without other work: seconds of the transfer, of the snapshot before it, and of CPU for both."""
    learner = opened[0]
    began, cpu = time.monotonic(), time.process_time()
    learner.push(number)
    took = time.monotonic() - began
    found = {"seconds": learner.await_push().receive_s, "snapshot_s": took, "cpu_s": time.process_time() - cpu}
    found["bytes"] = learner.n_bytes
    learner.store.set(f"over/{number}", "")
    return found


def memcpy() -> float:
    """Seconds to copy as many bytes as a push sends, in memory that was used before."""
    source, target = (torch.ones(opened[0].n_bytes, dtype=torch.uint8) for _ in range(2))
    return seconds(lambda: target.copy_(source))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"open": open_learner, "step": step, "push": push, "memcpy": memcpy}
torch.set_num_threads(1)

if __name__ == "__main__":
    serve(FUNCTIONS)
    leave(0)
