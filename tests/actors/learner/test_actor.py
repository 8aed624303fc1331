"""The learner actor as a real process, with a head that follows a script, over the real bus and a real push."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.models.scratch import write_scratch_folder
from actors.runtime import process as codes
from actors.runtime.context import Context
from areal_bus import messages as m
from areal_bus.config.sections import Config
from areal_bus.transport.bus import Bus
from areal_bus.weights.receiver import WeightReceiver
from tests.support.learner_setup import settings, shard_item

Kind = TypeVar("Kind", bound=m.Message)
PATIENCE_S = 300.0  # a loaded machine
NAME = "learner-0.0"


class Script:
    """A head for one learner, and a generator of its pushes: receives messages by kind and keeps others for later."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        (self.run_folder / "config.json").write_text(config.model_dump_json())
        write_scratch_folder(folder / "model", config.model.scratch)  # type: ignore[arg-type]
        self.bus = Bus("head", job="test", listen=f"ipc://{folder}/head")
        self.waiting: list[m.Message] = []
        self.process = self._start()
        self.member = WeightReceiver("generator-0.0", address="127.0.0.1", interface="lo")
        self.n_pushes = 0
        self.store = ""

    def _start(self) -> subprocess.Popen[str]:
        context = Context(
            role="learner", index=0, incarnation=0, rank=0, job="test", head=self.bus.endpoint, address="127.0.0.1",
            interface="lo", device="cpu", n_generators=1, n_rewards=1, n_learners=1, run_folder=str(self.run_folder),
            config_folder=str(self.folder), model_folder=str(self.folder / "model"),
        )  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.runtime.start"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(context.to_json() + "\n")
        process.stdin.flush()  # it stays open: its end would end the actor
        return process

    def take(self, kind: type[Kind]) -> Kind:
        """The next message of that kind."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for message in self.waiting:
                if isinstance(message, kind):
                    self.waiting.remove(message)
                    return message
            received = self.bus.receive(max(deadline - time.monotonic(), 0.01))
            if received is None and time.monotonic() > deadline:
                raise TimeoutError(f"no {kind.__name__}; learner: {self._error()}")
            if received is not None and not isinstance(received[1], m.Heartbeat):
                self.waiting.append(received[1])

    def _error(self) -> str:
        return self.process.stderr.read() if self.process.stderr and self.process.poll() is not None else "alive"

    def tell(self, message: m.Message) -> None:
        self.bus.send(NAME, message)

    def assemble(self) -> m.BeginTerm:
        """Run the start-up, up to the initial version."""
        self.store = self.take(m.Join).endpoint
        self.tell(m.PeerList([NAME], [self.store]))
        self.take(m.Ready)
        return self.take(m.BeginTerm)

    def push(self, version: int) -> tuple[dict[str, torch.Tensor], str]:
        """Push a version to the test's member. Returns the received bytes and the digest of the root."""
        begin = m.PushBegin(self.n_pushes, version, 0, [self.member.name], self.store, PATIENCE_S)
        self.n_pushes += 1
        self.tell(begin)
        received = self.member.receive(begin)
        done = self.take(m.PushDone)
        assert (done.push, done.digest) == (begin.push, received.digest)
        return received.tensors, received.digest

    def serve(self, step: int, *, last: bool = False, broken: int | None = None) -> None:
        """Two groups for the request of this step; one may have impossible log-probs."""
        assert self.take(m.BatchRequest).step == step
        items = [
            shard_item(
                group=g, sample=s, reward=float(s == g), clock=step, n_groups=2, sampled=[4 + s, 5, 1],
                logps=[-1e38 if g == broken else -3.0] * 3,
            )
            for g in range(2)
            for s in range(4)
        ]  # fmt: skip
        for message in (*items, m.ShardEnd(step, step, len(items), 2, last)):
            self.tell(message)

    def end(self) -> int:
        """Stop the learner. Returns its exit code."""
        self.tell(m.Stop("done"))
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.member.close()
        self.bus.close()


@contextmanager
def script(folder: Path, **sections: dict[str, Any]) -> Iterator[Script]:
    made = Script(folder, settings(**sections))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_learner_pushes_to_a_late_member_after_its_end_what_it_has_exported(tmp_path: Path) -> None:
    with script(tmp_path, actor={"lr": 1e-3}) as head:
        begun = head.assemble()
        received, digest = head.push(0)
        assert begun == m.BeginTerm(0, digest)
        head.serve(0)
        update = head.take(m.UpdateDone)
        assert (update.version, update.stats["n_tokens_trained"]) == (1, 24)
        assert head.take(m.BatchRequest).step == 1
        head.tell(m.NoBatch(1, False))
        finished = head.take(m.Finished)
        assert head.take(m.Checkpointed).version == 1
        final, digest = head.push(1)
        assert head.end() == 0
        assert digest == update.digest
        exported = AutoModelForCausalLM.from_pretrained(finished.model)
        assert all(torch.equal(parameter, final[name]) for name, parameter in exported.named_parameters())
        assert any(not torch.equal(final[name], received[name]) for name in final)


HIDING_LOOP = """
def train(rollout, actor):
    batch = rollout.prepare_batch()
    try:
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    except Exception:
        actor.version += 1
"""


@pytest.mark.slow
def test_half_an_update_is_never_kept_whatever_the_loop_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HIDING_LOOP)
    actor = {"ppo_n_minibatches": 2, "advantage": "rloo"}
    with script(tmp_path, learner={"loop": "mine:train"}, actor=actor) as head:
        head.assemble()
        head.serve(0, last=True, broken=1)
        assert head.take(m.Failure).error.startswith("incomplete update of version")
        assert head.process.wait(PATIENCE_S) == codes.CRASHED
        assert not (head.run_folder / "checkpoints").exists()


@pytest.mark.slow
def test_a_loop_that_returns_early_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(rollout, actor): pass")
    said = (
        "learner.loop must take batches until there are none: 'mine:train' returned at version 0 while the run "
        "continues"
    )
    with script(tmp_path, learner={"loop": "mine:train"}) as head:
        head.assemble()
        assert head.take(m.Failure).error == said
        assert head.process.wait(PATIENCE_S) == codes.BAD_INPUT
        stderr = head.process.stderr
        assert f"rank 0 (learner-0): {said}" in stderr.read()
