"""The simulator's ring over real sockets: production head, bus and wire in real time, optionally through proxies.

Engines, rewards and learners are simulated, so a ring runs in one thread at milliseconds a sample, and the witness
checks every invariant. One second is `PACE` seconds of the scenario.
"""

import random
import time
from dataclasses import replace
from heapq import heappop
from typing import Any

from areal_bus import messages as m
from areal_bus.transport.bus import Bus, BusOptions
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import HEAD, World
from tests.faults.proxy import Proxy

PACE = 40.0
JOB = "wired"
ANY = "tcp://127.0.0.1:0"
IDLE_S = 0.002


class Wires(World):
    """Each process has a Bus. Messages go over TCP in real time."""

    def __init__(self, rng: random.Random, **settings: Any) -> None:
        super().__init__(rng, **settings)
        self._began = time.monotonic()
        self.buses: dict[str, Bus] = {}
        self.proxies: dict[tuple[str, str], Proxy] = {}  # (who connects, to whom): seats, without incarnations
        self.silent_s = 0.0  # of the scenario

    def between(self, one: str, other: str) -> Proxy:
        """A proxy for the connection of the first to the second process. Call it before they connect."""
        listening = self._bus(HEAD if other == HEAD else other)
        return self.proxies.setdefault((seat(one), seat(other)), Proxy(listening.endpoint))

    def step(self) -> None:
        """Run due events, then receive messages."""
        self.now = (time.monotonic() - self._began) * PACE
        if self._events and self._events[0][0] <= self.now:
            _, _, act, args = heappop(self._events)
            act(*args)
            return
        n_taken = sum(self._take(name) for name in list(self.buses))
        if not n_taken:
            time.sleep(IDLE_S)

    def _take(self, name: str) -> bool:
        """Receive one message, if this process runs and there is one."""
        if self._stopped.get(name, 0.0) > self.now:
            return False
        got = self.buses[name].receive(0)
        if got is not None:
            self._arrive(got[0], name, got[1])
        return got is not None

    def send(self, sender: str, to: str, message: m.Message) -> None:
        bus = self._bus(sender)
        if sender != HEAD and to in self.buses:
            through = self.proxies.get((seat(sender), seat(to)))
            bus.connect(to, (through or self.buses[to]).endpoint)
        if isinstance(message, m.Heartbeat):
            message = replace(message, hears=bus.silence_s(HEAD) * PACE <= self.silent_s)
        bus.send(to, legal(message))

    def _bus(self, name: str) -> Bus:
        if name not in self.buses:
            listens = name == HEAD or name.startswith("reward-")
            self.buses[name] = Bus(
                name, job=JOB, listen=ANY if listens else "", options=BusOptions(reports_disconnects=name == HEAD)
            )
        return self.buses[name]

    def crash(self, name: str) -> None:
        super().crash(name)
        if name in self.buses:
            self.buses.pop(name).close(0.0)

    def close(self) -> None:
        for bus in self.buses.values():
            bus.close(0.0)
        for proxy in self.proxies.values():
            proxy.close()


def seat(name: str) -> str:
    return name.partition(".")[0]


def legal(message: m.Message) -> m.Message:
    """Fill in ids and log-probs for its segments: simulated samples have none."""
    if isinstance(message, m.Trajectory) and not message.ids:
        n_given = sum(given for given, _ in message.segments)
        n_sampled = sum(sampled for _, sampled in message.segments)
        return replace(message, ids=bytes(4 * (n_given + n_sampled)), logps=bytes(4 * n_sampled))
    return message


class WiredRing(Ring):
    """A ring over `Wires`; `with WiredRing(scenario) as ring: ... ring.run()`."""

    world: Wires

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, keeps_story=True, world_class=Wires)
        self.records = []
        self.world.silent_s = scenario.silent_s

    def __enter__(self) -> "WiredRing":
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def survive(self) -> ScheduleOutcome:
        """The ring ends, and no invariant is broken."""
        outcome = self.run()
        assert not outcome.violations, outcome.violations[0]
        assert outcome.end is not None, "the ring stalled"
        assert outcome.end.code == 0, outcome.end
        return outcome
