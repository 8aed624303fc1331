"""The surroundings of one generator (a thread or a process): a head, a reward and the learner's weights."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.generator import actor as generator
from actors.models.loading import load_model
from actors.models.scratch import write_scratch_folder
from actors.runtime.context import Context
from areal_bus.config.capacity import capacity
from areal_bus.config.sections import Config, ScratchConfig
from areal_bus.messages import Heartbeat, Join, Message, PeerList, Prompt, PushBegin, PushDone, Ready, Stop
from areal_bus.transport.bus import Bus
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import take_snapshot

NAME = "generator-0.0"
JOB = "job"
WAIT_S = 60.0  # for anything to happen, on a loaded machine


class Ring:
    """Everything around one generator."""

    def __init__(self, folder: Path, context: Context, *, apart: bool) -> None:
        self.folder, self.context = folder, context
        self.head = Bus("head", job=JOB, listen=context.head)
        self.reward = Bus("reward-0.0", job=JOB, listen=f"ipc://{folder}/reward")
        store, self.store = serve_store("127.0.0.1")
        self.root = WeightSender(store, interface="lo", address="127.0.0.1")
        self.failed: list[Exception] = []
        self.n_pushes = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run_apart if apart else self._run)
        self.thread.start()

    def _run_apart(self) -> None:
        """As its supervisor would: standard input stays open."""
        line = self.context.to_json().encode() + b"\n"
        with subprocess.Popen([sys.executable, "-m", "actors.runtime.start"], stdin=subprocess.PIPE) as self.process:
            assert self.process.stdin is not None
            self.process.stdin.write(line)
            self.process.stdin.flush()
            self.process.wait()

    def _run(self) -> None:
        try:
            generator.run(self.context)
        except Exception as error:  # noqa: BLE001  the test looks at it
            self.failed.append(error)

    def heard(self, kind: type[Message], bus: Bus | None = None) -> Any:
        """The next message, which is of that kind; heartbeats do not count."""
        while True:
            received = (bus or self.head).receive(WAIT_S)
            assert received is not None, f"no {kind.__name__} came"
            if isinstance(received[1], Heartbeat):
                continue
            assert isinstance(received[1], kind), received[1]
            return received[1]

    def beat_until(self, satisfied: Callable[[Heartbeat], bool]) -> None:
        """Wait for such a heartbeat; nothing else may come."""
        while not satisfied(self.next_beat()):
            pass

    def next_beat(self) -> Heartbeat:
        received = self.head.receive(WAIT_S)
        assert received is not None
        assert isinstance(received[1], Heartbeat), received[1]
        return received[1]

    def tell(self, message: Message) -> None:
        self.head.send(NAME, message)

    def join(self, *, with_reward: bool = True) -> None:
        assert self.heard(Join).name == NAME
        assert self.heard(Ready).capacity == capacity(self.context.config())
        if with_reward:
            self.list_reward()

    def list_reward(self, *, life: int = 0) -> None:
        self.tell(PeerList([self.reward.name], [self.reward.endpoint], life))

    def begin(self, version: int, *, term: int = 0, base: int = 0) -> PushBegin:
        begin = PushBegin(self.n_pushes, version, 0, [NAME], self.store, 10.0, term, base)
        self.n_pushes += 1
        self.tell(begin)
        return begin

    def push(self, version: int, *, term: int = 0, base: int = 0) -> PushDone:
        """Weights of `version` (random by it), from announcement to the generator's answer."""
        digest = self.send_weights(self.begin(version, term=term, base=base))
        answer: PushDone = self.heard(PushDone)
        assert answer.digest == digest
        return answer

    def send_weights(self, begin: PushBegin) -> str:
        """The root's part of an announced push; the digest."""
        weights = dict(self.model(begin.version).named_parameters())
        snapshot = take_snapshot(begin.version, weights, bucket_bytes=1 << 14)
        assert snapshot is not None
        assert self.root.push(snapshot, begin).digest == snapshot.digest
        return snapshot.digest

    def model(self, version: int) -> Any:
        return load_model(str(self.folder / "model"), "float32", "cpu", random_seed=version)

    def journal(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "journal" / "generator-0.0.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        self.tell(Stop("enough"))
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def ring(folder: Path, *, apart: bool = False, is_guest: bool = False, **sections: dict[str, Any]) -> Iterator[Ring]:
    """With the sections of the config that differ; `apart`: the generator is a process of its own."""
    write_scratch_folder(folder / "model", ScratchConfig(hidden_size=32, layers=2, heads=4, max_positions=4096))
    standard: dict[str, dict[str, Any]] = {
        "data": {"task": "reverse", "chat_template": False, "max_prompt_tokens": 12},
        "rollout": {"max_concurrent_rollouts": 4},
        "gconfig": {"n_samples": 2, "max_new_tokens": 10},
        "bus": {"silent_s": 0.15},
    }
    config = Config.model_validate(
        {key: {**standard.get(key, {}), **sections.get(key, {})} for key in standard | sections}
    )
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(config.model_dump_json())
    context = Context(
        role="generator", index=0, incarnation=0, rank=1, job=JOB, head=f"ipc://{folder}/head", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=1, n_rewards=1, n_learners=1, run_folder=str(folder / "run"),
        config_folder=str(folder), model_folder=str(folder / "model"), is_guest=is_guest,
    )  # fmt: skip
    running = Ring(folder, context, apart=apart)
    try:
        yield running
    finally:
        try:
            if running.thread.is_alive():
                running.stop()
        finally:
            if running.process is not None:
                running.process.kill()
        running.root.close()
        running.head.close(0.1)
        running.reward.close(0.1)


@contextmanager
def joined(folder: Path, *, version: int = 0, **sections: Any) -> Iterator[Ring]:
    """A generator that has joined and holds weights of this version."""
    with ring(folder, **sections) as around:
        around.join()
        around.push(version)
        yield around


def prompt(uid: int, question: str = "abc", *, samples: tuple[int, ...] = (0, 1), evaluation: str = "") -> Prompt:
    row = json.dumps({"question": question, "answer": question[::-1]})
    return Prompt(uid, 0, 0, list(samples), evaluation, row)
