"""A simulated reward actor: verdicts take time and may be an error or a timeout."""

import json
import random
from collections.abc import Sequence

from areal_bus import messages as m
from areal_bus.core.parts.reward_parts import dumped, of_roles
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import HEAD, World


class SimulatedReward:
    """One incarnation."""

    def __init__(self, world: World, scenario: Scenario, name: str, rng: random.Random) -> None:
        self.world, self.scenario, self.name, self.rng = world, scenario, name, rng
        self.values: dict[tuple[int, int, int], set[float]] = {}  # (uid, sample, attempt) -> values given
        self.failures: dict[tuple[int, int, int], set[str]] = {}  # (uid, sample, attempt) -> verdicts without a value
        self.group_verdicts: set[tuple[int, int, str, tuple[float, ...]]] = set()  # (uid, attempt, status, rewards)
        self._n_joins = 0
        self._life: int | None = None  # of the head, as it said last

    def receive(self, sender: str, message: m.Message) -> None:
        kind = type(message)
        if kind is m.Trajectory:
            delay = self.scenario.score_s * self.rng.expovariate(1.0)
            self.world.timer(self.name, delay, self._conclude, message)
        elif kind is m.Group:
            delay = self.scenario.score_s * self.rng.expovariate(1.0)
            self.world.timer(self.name, delay, self._compare, message)
        elif isinstance(message, m.HeadHeartbeat | m.PeerList):
            is_other, self._life = self._life not in (None, message.life), message.life
            if is_other:
                self._rejoin()
        elif kind is m.Rejoin:
            self._rejoin()
        elif kind is m.Stop:
            self.world.crash(self.name)

    def _rejoin(self) -> None:
        self._n_joins += 1
        index, incarnation = (int(number) for number in self.name.partition("-")[2].split("."))
        join = m.Join(self.name, m.Role.REWARD, index, incarnation, self.name, 1, "", self._n_joins)
        self.world.send(self.name, HEAD, join)
        self.world.send(self.name, HEAD, m.Ready(self.scenario.capacity))

    def _conclude(self, t: m.Trajectory) -> None:
        status, reward, correct = m.VerdictStatus.VALUE, self.rng.random(), None
        if self.scenario.is_flat(t.uid) and not t.evaluation:
            reward = 1.0
        if self.scenario.window is not None:
            correct = reward > 0.5
        if not t.evaluation:
            if self.rng.random() < self.scenario.p_error:
                status, correct = self.rng.choice((m.VerdictStatus.ERROR, m.VerdictStatus.TIMEOUT)), None
                self.failures.setdefault((t.uid, t.sample, t.attempt), set()).add(status.value)
            else:
                self.values.setdefault((t.uid, t.sample, t.attempt), set()).add(reward)
        error = "" if status is m.VerdictStatus.VALUE else "no value"
        verdict = {"status": status.value, "reward": reward, "correct": correct, "error": error, "score_s": 0.0}
        parts = dumped(of_roles(role_rewards(t.roles, reward)) if status is m.VerdictStatus.VALUE else {})
        scored = m.recast(t, m.Scored, **verdict, prompt_text="", text="", turns="", fields=b"", parts=parts)
        self.world.send(self.name, HEAD, scored)

    def _compare(self, group: m.Group) -> None:
        status, rewards = m.VerdictStatus.VALUE, ranks([sample["reward"] for sample in json.loads(group.samples)])
        if self.rng.random() < self.scenario.p_error:
            status, rewards = self.rng.choice((m.VerdictStatus.ERROR, m.VerdictStatus.TIMEOUT)), []
        self.group_verdicts.add((group.uid, group.attempt, status.value, tuple(rewards)))
        error = "" if rewards else "no value"
        self.world.send(self.name, HEAD, m.GroupScored(status.value, rewards, error, 0.0, group.uid, group.attempt))


def role_rewards(roles: str, reward: float) -> dict[str, float]:
    """Of the roles a, b and c."""
    return {role: {"a": reward, "b": -reward, "c": 2 * reward}[role] for role in roles.split()}


def ranks(values: Sequence[float]) -> list[float]:
    """Of each value the share of the others that are smaller."""
    return [sum(other < value for other in values) / max(1, len(values) - 1) for value in values]
