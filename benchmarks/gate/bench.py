"""Bench `gate`: the cost of a decision of gate and ledger with many live prompts.

The ring holds n live prompts under each policy and repeats: admit, verdict, batch, update, publish. Each call is one
decision; a batch counts as one decision a prompt.
"""

import time
from collections import deque
from dataclasses import dataclass

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.ledger import Ledger
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Scored
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures

LIVE = 100_000
BATCH = 1024
ETA = 127  # the window, (eta + 1) * B, holds all prompts: the longest loops possible
ROUNDS = 40


class GateBench:
    about = "microseconds a decision of gate and ledger with 100,000 live prompts, under each policy"

    def measure(self, *, quiet: bool) -> Figures:
        """Each policy in turn; the headline is the slowest."""
        each = {str(policy): round_trip(policy) for policy in StalenessPolicy}
        worst = max(each.values(), key=lambda timed: timed.us_per_decision)
        figures: Figures = {
            "bench": "gate",
            "us_per_decision": round(worst.us_per_decision, 3),
            "us_per_gate_decision": round(max(timed.us_per_gate_decision for timed in each.values()), 3),
            "live": min(timed.live for timed in each.values()),
            "batch_size": BATCH,
            "eta": ETA,
        }
        return figures | {f"us_{policy}": round(timed.us_per_decision, 3) for policy, timed in each.items()}


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds by decision."""

    us_per_decision: float  # of gate and ledger together
    us_per_gate_decision: float  # the admission decision alone
    live: int  # minimum in the timed part


def round_trip(policy: StalenessPolicy) -> Timed:
    """Fill the window over as many versions as it spans, then go round."""
    ring = GateState(policy)
    while ring.gate.live < LIVE + BATCH:
        ring.admit_some(2 * BATCH)
        ring.turn_clock()
    live, n_decisions = ring.gate.live, 0
    began = time.process_time()
    for _ in range(pace.of(ROUNDS, 8)):
        n_decisions += ring.turn_clock() + ring.admit_some(BATCH)
        live = min(live, ring.gate.live)
    seconds = time.process_time() - began
    alone = time.process_time()
    for _ in range(1000):
        ring.gate.may_admit(ring.gate.v)
    alone = time.process_time() - alone
    return Timed(1e6 * seconds / n_decisions, 1e6 * alone / 1000, live)


class GateState:
    """Gate and ledger with their prompts; verdicts come for the oldest."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self.gate = Gate(batch_size=BATCH, eta=ETA, policy=policy)
        self.ledger = Ledger()
        self._working: deque[int] = deque()

    def admit_some(self, n: int) -> int:
        """At most n new prompts. Returns decisions."""
        for decisions in range(n):
            if not self.gate.may_admit(self.gate.v):
                return decisions + 1
            self.gate.admit(self.gate.v)
            entry = self.ledger.admit(born=self.gate.v, n_samples=1, holder="g")
            self._working.append(entry.uid)
        return n

    def turn_clock(self) -> int:
        """Verdicts for a batch, the batch, its update, its publishing. Returns decisions."""
        gate, ledger = self.gate, self.ledger
        done = [self._working.popleft() for _ in range(BATCH)]
        for uid in done:
            ledger.deliver(verdict(uid, gate.v))
        if not gate.may_take(BATCH, ledger.ready.born):
            raise ImpossibleEvent("the oldest may always be taken")
        gate.take([entry.born for entry in ledger.take(len(done), gate.w)])
        gate.finish_update(gate.w)
        ledger.trained(gate.u - 1)
        gate.publish(gate.u)
        return 2 * len(done) + 3


def verdict(uid: int, version: int) -> Scored:
    return Scored(
        status="value", reward=0.0, correct=None, error="", score_s=0.0, uid=uid, sample=0, attempt=0, evaluation="",
        generator="g", finish="stop", segments=[[1, 1]], spans=[[version, 1]], seconds=0.0, term=0, ids=b"", logps=b"",
        prompt_text="", text="",
    )  # fmt: skip
