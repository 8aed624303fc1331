"""A reward actor without a function: a verdict takes time and may be an error or a timeout; it keeps no state."""

import random

from areal_bus import messages as m
from areal_bus.simulation.scenario import Scenario
from areal_bus.simulation.world import HEAD, World


class Reward:
    """One incarnation."""

    def __init__(self, world: World, scenario: Scenario, name: str, rng: random.Random) -> None:
        self.world, self.scenario, self.name, self.rng = world, scenario, name, rng
        self.values: dict[tuple[int, int, int], set[float]] = {}  # (uid, sample, attempt) -> values given

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.Trajectory):
            delay = self.scenario.score_s * self.rng.expovariate(1.0)
            self.world.timer(self.name, delay, self._conclude, message)
        elif isinstance(message, m.Stop):
            self.world.crash(self.name)

    def _conclude(self, t: m.Trajectory) -> None:
        status, reward = m.VerdictStatus.VALUE, self.rng.random()
        if not t.evaluation:
            if self.rng.random() < self.scenario.p_error:
                status = self.rng.choice((m.VerdictStatus.ERROR, m.VerdictStatus.TIMEOUT))
            else:
                self.values.setdefault((t.uid, t.sample, t.attempt), set()).add(reward)
        error = "" if status is m.VerdictStatus.VALUE else "no value"
        scored = m.Scored(
            str(status), reward, None, error, 0.0, t.uid, t.sample, t.attempt, t.evaluation, t.generator, t.finish,
            t.segments, t.spans, t.seconds, t.ids, t.logps, "", "",
        )  # fmt: skip
        self.world.send(self.name, HEAD, scored)
