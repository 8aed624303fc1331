"""A scripted head for learners in real processes, over the real bus and a real push."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.models.scratch import write_scratch_folder
from actors.runtime.context import Context
from areal_bus import messages as m
from areal_bus.config.sections import Config
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint
from areal_bus.storage import head_checkpoints
from areal_bus.transport.bus import Bus
from areal_bus.weights.receiver import WeightReceiver
from tests.support.learner_setup import settings, shard_item

Kind = TypeVar("Kind", bound=m.Message)
PATIENCE_S = 60.0


class Script:
    """A head for one or two learners: receives messages by kind and keeps others for later."""

    def __init__(self, folder: Path, config: Config, *, n_learners: int = 1) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        (self.run_folder / "config.json").write_text(config.model_dump_json())
        if config.model.scratch is not None:
            write_scratch_folder(folder / "model", config.model.scratch)
        self.n_learners = n_learners
        self.incarnations = [0] * n_learners
        self.bus = Bus("head", job="test", listen=f"ipc://{folder}/head")
        self.waiting: list[tuple[str, m.Message]] = []
        self.processes = [self._start(index) for index in range(n_learners)]
        self.member = WeightReceiver("generator-0.0", address="127.0.0.1", interface="lo")
        self.n_pushes = 0
        self.store = ""

    def _start(self, index: int) -> subprocess.Popen[str]:
        context = Context(
            role="learner", index=index, incarnation=self.incarnations[index], rank=index, job="test",
            head=self.bus.endpoint, address="127.0.0.1", interface="lo", device="cpu", n_generators=1, n_rewards=1,
            n_learners=self.n_learners, run_folder=str(self.run_folder), config_folder=str(self.folder),
            model_folder=str(self.folder / "model"),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.runtime.start"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(context.to_json() + "\n")
        process.stdin.flush()  # it stays open: its end would end the actor
        return process

    def come_back(self, index: int) -> None:
        """Act as the supervisor of a learner that has ended."""
        self.processes[index].communicate(timeout=PATIENCE_S)
        self.incarnations[index] += 1
        self.processes[index] = self._start(index)

    def name(self, index: int) -> str:
        return f"learner-{index}.{self.incarnations[index]}"

    def take(self, kind: type[Kind], where: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """The next message of that kind."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for number, (_, message) in enumerate(self.waiting):
                if isinstance(message, kind) and where(message):
                    del self.waiting[number]
                    return message
            received = self.bus.receive(max(deadline - time.monotonic(), 0.01))
            if received is None and time.monotonic() > deadline:
                raise TimeoutError(f"no {kind.__name__}; learner: {self._errors()}")
            if received is not None and not isinstance(received[1], m.Heartbeat):
                self.waiting.append(received)

    def tell(self, message: m.Message) -> None:
        for index in range(self.n_learners):
            self.bus.send(self.name(index), message)

    def push(self, version: int) -> tuple[dict[str, torch.Tensor], str]:
        """Push a version to the test's member. Returns the received bytes and the digest of the root."""
        name = self.member.name
        begin = m.PushBegin(self.n_pushes, version, 0, [name], self.store, PATIENCE_S)
        self.n_pushes += 1
        self.bus.send(self.name(0), begin)
        received = self.member.receive(begin)
        done = self.take(m.PushDone, lambda done: done.push == begin.push)
        assert done.digest == received.digest
        return received.tensors, received.digest

    def assemble(self) -> m.BeginTerm:
        """Run the start-up, up to the initial version."""
        joins = [self.take(m.Join) for _ in range(self.n_learners)]
        self.store = next(join.endpoint for join in joins if join.index == 0)
        self.tell(m.PeerList([self.name(0)], [self.store]))
        for _ in range(self.n_learners):
            self.take(m.Ready)
        return self.take(m.BeginTerm)

    def succeed(self, life: int) -> m.BeginTerm:
        """Become the head's next incarnation without members, up to the reports of the surviving learners."""
        self.tell(m.Rejoin("only a member may speak", life))
        for _ in range(self.n_learners):
            self.take(m.Join, lambda join: join.again == life)
        self.tell(m.PeerList([self.name(0)], [self.store], life))
        for _ in range(self.n_learners):
            self.take(m.Ready)
        return self.take(m.BeginTerm, lambda begin: begin.life == life)

    def write_frontier(self, version: int) -> None:
        """The head's file of a checkpoint."""
        head_checkpoints.save(head_checkpoints.path_of(self.run_folder / "frontiers", version), HeadCheckpoint(version))

    def serve(self, step: int, *, last: bool = False, broken: int | None = None) -> None:
        """Two groups for each request of this step, spread over the learners; one may have impossible log-probs."""
        for _ in range(self.n_learners):
            assert self.take(m.BatchRequest).step == step
        self.hand_out(step, last=last, broken=broken)

    def hand_out(self, step: int, *, last: bool, broken: int | None = None, to: Iterable[int] | None = None) -> None:
        """Send shares to these ranks, by default to all."""
        for index in range(self.n_learners) if to is None else to:
            groups = [g for g in range(2) if g % self.n_learners == index]
            items = [
                shard_item(
                    group=g, sample=s, reward=float(s == g), clock=step, n_groups=2, sampled=[4 + s, 5, 1],
                    logps=[-1e38 if g == broken else -3.0] * 3,
                )
                for g in groups
                for s in range(4)
            ]  # fmt: skip
            for item in items:
                self.bus.send(self.name(index), item)
            self.bus.send(self.name(index), m.ShardEnd(step, step, len(items), 2, last))

    def end(self) -> list[int]:
        """Stop the learners. Returns their exit codes."""
        self.tell(m.Stop("done"))
        return [process.wait(PATIENCE_S) for process in self.processes]

    def journal(self, event: str, index: int = 0) -> list[dict[str, Any]]:
        lines = (self.run_folder / "journal" / f"{self.name(index)}.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def _errors(self) -> list[str]:
        return [p.stderr.read() if p.stderr and p.poll() is not None else "alive" for p in self.processes]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.member.close()
        self.bus.close()


@contextmanager
def script(folder: Path, n_learners: int = 1, **sections: dict[str, Any]) -> Iterator[Script]:
    made = Script(folder, settings(**sections), n_learners=n_learners)
    try:
        yield made
    finally:
        made.close()
