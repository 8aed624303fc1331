"""One schedule from its seed to its end: the head, the actors around it, the faults and the witness."""

import random
from dataclasses import dataclass
from typing import Any

from areal_bus import messages as m
from areal_bus.effects import Effect, End, Record, Send
from areal_bus.errors import ArealBusError
from areal_bus.head import Head
from areal_bus.messages import Role
from areal_bus.simulation.generator import Generator
from areal_bus.simulation.learner import Learners
from areal_bus.simulation.reward import Reward
from areal_bus.simulation.scenario import Fault, Numbers, Scenario
from areal_bus.simulation.witness import Violation, Witness
from areal_bus.simulation.world import HEAD, World

MAX_EVENTS = 2_000_000
TICK_S = 4.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a schedule."""

    end: End | None  # None when it never ended
    violations: list[Violation]
    n_events: int
    seconds: float  # virtual


class Ring:
    """Runs one scenario. `head_class` may be another head, to see what a wrong rule does."""

    def __init__(self, scenario: Scenario, *, keeps_story: bool = False, head_class: type[Head] = Head) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed * 2 + 1)
        self.world = World(
            self.rng,
            link_s=scenario.link_s,
            p_lost=scenario.p_lost,
            p_twice=scenario.p_twice,
            calm_s=scenario.calm_s,
            keeps_story=keeps_story,
        )
        self.head = head_class(scenario.rules, Numbers(scenario.n_rows), now=0.0)
        self.witness = Witness(scenario, self.head)
        self.learners = Learners(self.world, scenario, self.rng, self.witness.trained)
        self.end: End | None = None
        self.records: list[tuple[float, Record]] | None = None  # all of them, when somebody sets a list
        self.names: dict[tuple[Role, int], str] = {}  # who is there now
        self._moved_s = 0.0  # when an update was finished last
        self._u = 0
        self.stalled: Violation | None = None

    # the run

    def run(self) -> Outcome:
        """To the end of the job, or until everybody waits."""
        self._begin()
        world = self.world
        try:
            while self.end is None and self.stalled is None:
                world.step()
                if self.head.gate.u != self._u:
                    self._u, self._moved_s = self.head.gate.u, world.now
        except ArealBusError as impossible:
            self.stalled = Violation("I11", f"an actor ended with an error: {impossible}", world.now)
        if self.stalled is not None:
            self.witness.violations.append(self.stalled)
        else:
            self._check_end()
        return Outcome(self.end, self.witness.violations, world.n_events, world.now)

    def _stalled(self) -> Violation | None:
        """I11: after the last fault an update comes within a bounded time, or the job ends."""
        world, scenario = self.world, self.scenario
        since = max(self._moved_s, scenario.calm_s, *scenario.joins_s, 0.0)
        if world.now - since <= scenario.patience_s and world.n_events < MAX_EVENTS:
            return None
        counts = {str(state): n for state, n in self.head.rollouts.ledger.counts.items() if n}
        gate = self.head.gate
        where = f"{self.head.phase}, u {gate.u}, v {gate.v}, w {gate.w}, {counts}"
        return Violation("I11", f"no update for {world.now - since:.0f} s and no end: {where}", world.now)

    def _check_end(self) -> None:
        end, witness, scenario = self.end, self.witness, self.scenario
        witness.now = self.world.now
        if end is None:
            return
        if end.code == 0:
            witness.end()
            u = self.head.gate.u
            done = (u == scenario.total_steps and not scenario.rejects_all) or self.head.supply.is_exhausted
            witness.check("I11", done, f"ended well at update {u}, without a reason")
        else:
            given_up = "in a row ended without a reward" in end.sentence and scenario.p_error + scenario.p_unsampled
            unreached = "pushes in a row" in end.sentence and scenario.calm_s
            witness.check("I11", bool(given_up or unreached), f"ended in error: {end.sentence}")

    # the beginning

    def _begin(self) -> None:
        scenario, world = self.scenario, self.world
        world.nodes[HEAD] = self
        for i, rank in enumerate(self.learners.ranks):
            world.at(self.rng.uniform(0, 2), self._start_learner, i, rank)
        for i in range(scenario.n_rewards):
            world.at(self.rng.uniform(0, 2), self._start, Role.REWARD, i, 0)
        for i in range(scenario.n_generators):
            joins_s = scenario.joins_s[i] if i < len(scenario.joins_s) else self.rng.uniform(0, 2)
            world.at(joins_s, self._start, Role.GENERATOR, i, 0)
        for fault in scenario.faults:
            world.at(fault.at_s, self._inflict, fault)
        world.at(TICK_S, self._tick)

    def _start(self, role: Role, index: int, incarnation: int) -> None:
        """A process comes up: Join at once, Ready when it has loaded."""
        name = f"{role}-{index}.{incarnation}"
        world = self.world
        if role is Role.GENERATOR:
            generator = Generator(world, self.scenario, name, self.rng)
            self.witness.generators[name] = world.nodes[name] = generator
        else:
            reward = Reward(world, self.scenario, name, self.rng)
            self.witness.rewards.append(reward)
            world.nodes[name] = reward
        self.names[role, index] = name
        world.tell(f"{name} starts", None)
        world.send(name, HEAD, m.Join(name, role, index, incarnation, "" if role is Role.GENERATOR else name, 1, ""))
        world.timer(name, self.rng.uniform(0, 2), world.send, name, HEAD, m.Ready(self.scenario.capacity))
        world.timer(name, self.scenario.heartbeat_s, self._beat, name)

    def _start_learner(self, index: int, rank: Any) -> None:
        name, world = rank.name, self.world
        world.nodes[name] = rank
        world.send(name, HEAD, m.Join(name, Role.LEARNER, index, 0, name, 1, ""))
        world.send(name, HEAD, m.Ready(0))
        if index == 0:
            world.send(name, HEAD, m.UpdateDone(0, {}, "digest 0"))
        rank.begin()
        world.timer(name, self.scenario.heartbeat_s, self._beat, name)

    def _beat(self, name: str) -> None:
        is_learner = name.startswith(Role.LEARNER)  # beside the head; one that is silent ends the job
        self.world.send(name, HEAD, m.Heartbeat(0, None, ""), is_sure=is_learner)
        self.world.timer(name, self.scenario.heartbeat_s, self._beat, name)

    # faults

    def _inflict(self, fault: Fault) -> None:
        name = self.names.get((fault.role, fault.index))
        if name is None or name not in self.world.nodes:
            return
        self.world.tell(f"{fault.kind} of {name} for {fault.for_s:.1f} s", None)
        if fault.kind == "crash":
            self.world.crash(name)
            incarnation = int(name.rpartition(".")[2]) + 1
            self.world.at(self.world.now + fault.for_s, self._start, fault.role, fault.index, incarnation)
        elif fault.kind == "stop":
            self.world.stop(name, fault.for_s)
        else:
            self.world.cut(name, fault.for_s)

    # the head

    def receive(self, sender: str, message: m.Message) -> None:
        self.carry_out(self.head.on(sender, message, self.world.now))

    def _tick(self) -> None:
        self.carry_out(self.head.tick(self.world.now))
        self.stalled = self._stalled()
        self.world.at(self.world.now + TICK_S, self._tick)

    def carry_out(self, effects: list[Effect]) -> None:
        witness = self.witness
        witness.now = self.world.now
        for effect in effects:
            witness.see(effect)
            if isinstance(effect, Send):
                self.world.send(HEAD, effect.to, effect.message)
            elif isinstance(effect, End):
                self.end = effect
            elif isinstance(effect, Record):
                self.world.tell(str(effect.event), effect.fields)
                if self.records is not None:
                    self.records.append((self.world.now, effect))
