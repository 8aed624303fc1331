"""One actor process of the ring of the bench `wire`: generator, reward or head.

Bus, keys, gate and ledger are the real ones; tokens and verdicts are made up.
"""

import array
import os
import random
import time
from typing import Any

from actors.generator.delivery import Delivery
from actors.rewards.actor import scored
from actors.rewards.pool import Verdict
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.ledger import Ledger
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import Ack, Finish, Heartbeat, Message, PeerList, Sampled, Scored, Trajectory, VerdictStatus
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import Keyring, new_pair
from benchmarks.harness.worker_main import serve

JOB = "bench-wire"
GENERATOR, REWARD, HEAD = "generator-0.0", "reward-0.0", "head"
LOOPBACK = "tcp://127.0.0.1:0"
WAIT_S = 60.0
WARM = 500  # trajectories before the clock starts


class RingActor:
    """A process of the ring. It is one of the three from `open` on."""

    def __init__(self) -> None:
        self._pair = new_pair()

    def key(self) -> str:
        return self._pair.public

    def open(self, name: str, keys: dict[str, str], heads: str) -> str:
        """Its bus, encrypted; connected to the head unless it is the head. Returns where it listens."""
        listen = "" if name == GENERATOR else LOOPBACK
        self._bus = Bus(name, job=JOB, listen=listen, keys=Keyring(self._pair, keys))
        if heads:
            self._bus.connect(HEAD, heads)
            self._bus.send(HEAD, Heartbeat(progress=0, version=None, note="", hears=True))
        return self._bus.endpoint

    def hear_all(self, n: int) -> None:
        """Wait until this many peers are connected; nothing can be sent to them before."""
        heard: set[str] = set()
        while len(heard) < n:
            received = self._bus.receive(WAIT_S)
            if received is None:
                raise TimeoutError(f"{n} actors must be heard within {WAIT_S:g} s: {sorted(heard)} were")
            heard.add(received[0])

    def close(self) -> None:
        self._bus.close()

    def next(self) -> Message:
        received = self._bus.receive(WAIT_S)
        if received is None:
            raise TimeoutError(f"a message must come within {WAIT_S:g} s")
        return received[1]

    def generate(self, n: int, n_bytes: int, window: int, reward: str) -> None:
        """Send n trajectories of `n_bytes` of tokens, at most `window` unacknowledged, until all are acknowledged."""
        delivery, made, acknowledged = Delivery(resend_s=WAIT_S), 0, 0
        for name, endpoint in delivery.update_rewards(PeerList([REWARD], [reward]))[0].items():
            self._bus.connect(name, endpoint)
        ids, logps = tokens(n_bytes)
        while acknowledged < n:
            while made < n and made - acknowledged < window:
                delivery.add(trajectory(made, ids, logps))
                made += 1
            for to, sent, _ in delivery.due(time.monotonic(), self._bus.n_waiting):
                self._bus.send(to, sent)
                self._bus.send(HEAD, Sampled(sent.uid, sent.sample, sent.attempt, "", len(logps) // 4))
            message: Message | None = self.next()
            while message is not None:
                if isinstance(message, Ack):
                    delivery.ack((message.evaluation, message.uid, message.attempt, message.sample))
                    acknowledged += 1
                received = self._bus.receive(0)
                message = received[1] if received else None

    def score(self, n: int) -> None:
        """Judge n trajectories."""
        for _ in range(n):
            message = self.next()
            if not isinstance(message, Trajectory):
                raise TypeError(f"a reward of this ring hears trajectories: {type(message).__name__} came")
            key = (message.evaluation, message.uid, message.sample, message.attempt)
            verdict = Verdict(key, VerdictStatus.VALUE, 1.0, True, "", 0.0)
            self._bus.send(HEAD, scored(message, verdict))

    def collect(self, n: int, batch_size: int) -> dict[str, float]:
        """Gate and ledger over n scored trajectories: seconds from the WARMth to the last, and how many batches."""
        books = Books(batch_size)
        began, cpu = time.perf_counter(), os.times()
        n_seen = 0
        while n_seen < n:
            message = self.next()
            if isinstance(message, Sampled):
                books.sampled(message)
            if not isinstance(message, Scored):
                continue
            books.deliver(message)
            self._bus.send(GENERATOR, Ack(message.uid, message.sample, message.attempt, message.evaluation))
            n_seen += 1
            if n_seen == WARM:
                began, cpu = time.perf_counter(), os.times()
        after = os.times()
        return {
            "seconds": time.perf_counter() - began,
            "cpu_s": after.user + after.system - cpu.user - cpu.system,
            "batches": books.gate.u,
            "n": n_seen - WARM,
        }


class Books:
    """Gate and ledger of the head; one sample a prompt."""

    def __init__(self, batch_size: int) -> None:
        self.gate = Gate(batch_size=batch_size, eta=15, policy=StalenessPolicy.MASK)
        self.ledger = Ledger()
        self._batch_size = batch_size
        self._n_scored = 0  # the one generator sends in order: these are the first ones
        self._admit()

    def _admit(self) -> None:
        while self.gate.may_admit(self.gate.v):
            self.gate.admit(self.gate.v)
            self.ledger.admit(born=self.gate.v, n_samples=1, holder=GENERATOR)

    def sampled(self, message: Sampled) -> None:
        """News, unless its verdict has overtaken it."""
        if message.uid >= self._n_scored:
            self.ledger.sampled(GENERATOR, message)

    def deliver(self, verdict: Scored) -> None:
        """Into the ledger; a full batch is taken, trained and published at once, and as many prompts admitted."""
        gate, ledger = self.gate, self.ledger
        ledger.deliver(verdict)
        self._n_scored += 1
        if len(ledger.ready) == self._batch_size and gate.may_take(self._batch_size, ledger.ready.born):
            gate.take([entry.born for entry in ledger.take(self._batch_size, gate.w)])
            gate.finish_update(gate.w)
            ledger.trained(gate.u - 1)
            gate.publish(gate.u)
            self._admit()


def tokens(n_bytes: int) -> tuple[bytes, bytes]:
    """Ids and log-probs, of eight bytes a token together, all sampled but the first."""
    dice, n = random.Random(1), n_bytes // 8
    ids = array.array("i", [dice.randrange(150_000) for _ in range(n + 1)])
    return ids.tobytes(), array.array("f", [-dice.random() for _ in range(n)]).tobytes()


def trajectory(uid: int, ids: bytes, logps: bytes) -> Trajectory:
    n = len(logps) // 4
    return Trajectory(
        uid=uid, sample=0, attempt=0, evaluation="", generator=GENERATOR, finish=Finish.STOP, segments=[[1, n]],
        spans=[[0, n]], seconds=1.0, term=0, ids=ids, logps=logps, prompt_text="", text="", row="{}",
    )  # fmt: skip


if __name__ == "__main__":
    actor = RingActor()
    does: dict[str, Any] = {
        name: getattr(actor, name) for name in ("key", "open", "hear_all", "close", "generate", "score", "collect")
    }
    serve(does)
