"""The learner actor as a real process, with a head that follows a script, over the real bus and a real push."""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.context import Context
from actors.models.scratch import write_scratch_folder
from areal_bus import messages as m
from areal_bus.bus import Bus
from areal_bus.config import Config
from areal_bus.weights import Member
from tests.learner_setup import settings, shard_item

Kind = TypeVar("Kind", bound=m.Message)
PATIENCE_S = 60.0


class Script:
    """A head for one or two learners: takes messages in order of their kinds, keeps the rest for later."""

    def __init__(self, folder: Path, config: Config, *, n_learners: int = 1) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        self.run_folder.mkdir()
        (self.run_folder / "config.json").write_text(config.model_dump_json())
        if config.model.scratch is not None:
            write_scratch_folder(folder / "model", config.model.scratch)
        self.n_learners = n_learners
        self.bus = Bus("head", job="test", listen=f"ipc://{folder}/head")
        self.waiting: list[tuple[str, m.Message]] = []
        self.processes = [self._start(index) for index in range(n_learners)]
        self.member = Member("generator-0.0", address="127.0.0.1", interface="lo")
        self.n_pushes = 0
        self.store = ""

    def _start(self, index: int) -> subprocess.Popen[str]:
        context = Context(
            role="learner",
            index=index,
            incarnation=0,
            rank=index,
            job="test",
            head=self.bus.endpoint,
            address="127.0.0.1",
            interface="lo",
            device="cpu",
            n_generators=1,
            n_rewards=1,
            n_learners=self.n_learners,
            run_folder=str(self.run_folder),
            config_folder=str(self.folder),
            model_folder=str(self.folder / "model"),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.start"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(context.to_json() + "\n")
        process.stdin.flush()  # it stays open: its end would end the actor
        return process

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
            self.bus.send(f"learner-{index}.0", message)

    def push(self, version: int) -> tuple[dict[str, torch.Tensor], str]:
        """Push a version to the test's own member; what it received and the digest that the root announced."""
        name = self.member.name
        begin = m.PushBegin(self.n_pushes, version, 0, [name], self.store, PATIENCE_S)
        self.n_pushes += 1
        self.bus.send("learner-0.0", begin)
        tensors, digest, _ = self.member.receive(begin)
        done = self.take(m.PushDone, lambda done: done.push == begin.push)
        assert done.digest == digest
        return tensors, digest

    def assemble(self) -> m.UpdateDone:
        """Up to version 0."""
        joins = [self.take(m.Join) for _ in range(self.n_learners)]
        self.store = next(join.endpoint for join in joins if join.index == 0)
        self.tell(m.Directory(["learner-0.0"], [self.store]))
        for _ in range(self.n_learners):
            self.take(m.Ready)
        return self.take(m.UpdateDone)

    def serve(self, step: int, *, last: bool = False, broken: int | None = None) -> None:
        """Two groups for every request of this step, dealt over the learners; one may have impossible log-probs."""
        for _ in range(self.n_learners):
            assert self.take(m.BatchRequest).step == step
        self.hand_out(step, last=last, broken=broken)

    def hand_out(self, step: int, *, last: bool, broken: int | None = None) -> None:
        for index in range(self.n_learners):
            groups = [g for g in range(2) if g % self.n_learners == index]
            items = [
                shard_item(
                    group=g,
                    sample=s,
                    reward=float(s == g),
                    clock=step,
                    n_groups=2,
                    sampled=[4 + s, 5, 1],
                    logps=[-math.inf if g == broken else -3.0] * 3,
                )
                for g in groups
                for s in range(4)
            ]
            for item in items:
                self.bus.send(f"learner-{index}.0", item)
            self.bus.send(f"learner-{index}.0", m.ShardEnd(step, step, len(items), 2, last))

    def end(self) -> list[int]:
        """Stop; the exit codes."""
        self.tell(m.Stop("done"))
        return [process.wait(PATIENCE_S) for process in self.processes]

    def journal(self, event: str, index: int = 0) -> list[dict[str, Any]]:
        lines = (self.run_folder / "journal" / f"learner-{index}.0.jsonl").read_text().splitlines()
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


def test_a_learner_lives_from_warm_up_to_its_exported_model(tmp_path: Path) -> None:
    data = {"task": "reverse", "prompt": "{question}>", "chat_template": False}
    sections: dict[str, Any] = {
        "data": data,
        "learner": {"warmup": {"steps": 3, "batch_size": 8}},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "actor": {"lr": 1e-3},
    }
    with script(tmp_path, **sections) as head:
        versions = [head.assemble()]
        assert (versions[0].version, versions[0].stats) == (0, {})
        received, digest = head.push(0)
        assert digest == versions[0].digest
        for step in range(3):
            head.serve(step)
            versions.append(head.take(m.UpdateDone))
            assert versions[-1].version == step + 1
            assert versions[-1].stats["n_tokens_trained"] == 24
        assert head.push(3)[1] == versions[3].digest != digest
        assert head.take(m.BatchRequest).step == 3
        head.tell(m.NoBatch(3))
        finished = head.take(m.Finished)
        final, _ = head.push(3)  # a late member, after the loop has ended
        assert head.end() == [0]
        assert [p.name for p in sorted((head.run_folder / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
        assert finished.checkpoint.endswith("step-000003")
        exported = AutoModelForCausalLM.from_pretrained(finished.model)
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, final[name]), name
        assert any(not torch.equal(final[name], received[name]) for name in final)
        _check_journal(head)


def _check_journal(head: Script) -> None:
    assert [line["version"] for line in head.journal("step")] == [1, 2, 3]
    assert {"reward", "mismatch_kl", "entropy", "grad_norm", "ess", "lag_max"} <= set(head.journal("step")[0])
    assert len(head.journal("warmup")) == 3
    assert [line["step"] for line in head.journal("checkpoint")] == [2, 3]
    assert len(head.journal("export")) == 1
    assert [line["version"] for line in head.journal("pushed")] == [0, 3, 3]
    spent: dict[str, float] = {}
    for line in head.journal("spans"):
        for label, seconds in line.items():
            if label.startswith("s_"):
                spent[label] = spent.get(label, 0.0) + seconds
    labels = {"s_load", "s_warmup", "s_wait_batch", "s_backward", "s_optimizer", "s_snapshot", "s_checkpoint"}
    assert labels <= set(spent)
    assert sum(spent.values()) == pytest.approx(head.journal("end")[0]["wall_s"], rel=0.01)  # I12


def test_a_push_goes_on_while_the_learner_waits_and_stop_ends_the_wait(tmp_path: Path) -> None:
    with script(tmp_path) as head:
        digest = head.assemble().digest
        head.take(m.BatchRequest)
        assert head.push(0)[1] == digest
        head.bus.send("learner-0.0", m.PushBegin(7, 5, 0, ["generator-0.0"], head.store, 5.0))
        assert head.take(m.PushBroken).error == "version 5 is not kept; kept are [0]"
        assert head.end() == [0]
        assert not (head.run_folder / "checkpoints").exists()


def test_the_last_share_ends_the_loop_without_another_request(tmp_path: Path) -> None:
    with script(tmp_path, checkpoint={"at_end": False}) as head:
        head.assemble()
        head.serve(0, last=True)
        assert head.take(m.Finished) == m.Finished(checkpoint="", model="")
        assert head.end() == [0]


def test_two_learners_are_one(tmp_path: Path) -> None:
    with script(tmp_path, n_learners=2) as head:
        assert head.assemble().version == 0
        head.serve(0, last=True)
        update = head.take(m.UpdateDone)
        assert update.stats["n_tokens"] == 24
        received, digest = head.push(1)
        assert digest == update.digest
        finished = [head.take(m.Finished) for _ in range(2)]
        assert head.end() == [0, 0]
        assert finished[0] == finished[1]
        assert not any(isinstance(message, m.UpdateDone) for _, message in head.waiting)
        exported = load_file(f"{finished[0].model}/model.safetensors")
        assert exported.keys() == received.keys()
        assert all(torch.equal(exported[name], received[name]) for name in exported)
        assert len(head.journal("step", index=1)) == 0


def test_the_learner_that_is_left_says_so_in_one_sentence(tmp_path: Path) -> None:
    with script(tmp_path, n_learners=2, checkpoint={"at_end": False}) as head:
        head.assemble()
        left, gone = head.processes
        for _ in range(2):
            head.take(m.BatchRequest)
        gone.kill()
        gone.wait()
        head.hand_out(0, last=True)
        said = head.take(m.Failure).error
        assert re.fullmatch(
            r"learners compute together: learner-0 lost touch with another one.*\([^()\n]{1,200}\)", said
        )
        assert "gloo" not in said
        assert left.stderr is not None
        assert left.stderr.read() == f"rank 0 (learner-0): {said}\n"
        assert left.wait(PATIENCE_S) == 1


OWN_LOOP = """
def train(rollout, actor):
    for batch in rollout:
        for item in batch.items:
            assert item.n_trained
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    open({path!r}, "w").write(str(actor.version))
"""


def test_a_users_own_loop_is_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOOP.format(path=str(tmp_path / "seen")))
    with script(tmp_path, learner={"loop": "mine:train"}) as head:
        head.assemble()
        head.serve(0)
        head.serve(1, last=True)
        head.take(m.Finished)
        assert head.end() == [0]
    assert (tmp_path / "seen").read_text() == "2"


HIDING_LOOP = """
def train(rollout, actor):
    batch = rollout.prepare_batch()
    try:
        actor.ppo_update(actor.compute_advantages_and_returns(batch))
    except Exception:
        actor.version += 1
"""


def test_half_an_update_is_never_kept_whatever_the_loop_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HIDING_LOOP)
    actor = {"ppo_n_minibatches": 2, "advantage": "rloo"}
    with script(tmp_path, learner={"loop": "mine:train"}, actor=actor) as head:
        head.assemble()
        head.serve(0, last=True, broken=1)
        assert head.take(m.Failure).error.startswith("only whole updates are trained on, pushed and kept")
        assert head.processes[0].wait(PATIENCE_S) == 1
        assert not (head.run_folder / "checkpoints").exists()


def test_a_loop_that_leaves_the_last_batch_untrained_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(rollout, actor): rollout.prepare_batch()")
    with script(tmp_path, learner={"loop": "mine:train"}) as head:
        head.assemble()
        head.serve(0, last=True)
        assert "took the batch of step 0 and made no update of it" in head.take(m.Failure).error
        assert head.processes[0].wait(PATIENCE_S) == 2


def test_a_loop_that_returns_early_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(rollout, actor): pass")
    said = "learner.loop takes batches until there are none: 'mine:train' returned at version 0 while the run goes on"
    with script(tmp_path, learner={"loop": "mine:train"}) as head:
        assert head.take(m.Failure).error == said
        assert head.processes[0].wait(PATIENCE_S) == 2
        stderr = head.processes[0].stderr
        assert stderr is not None
        assert f"rank 0 (learner-0): {said}" in stderr.read()
