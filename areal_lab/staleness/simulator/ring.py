"""One schedule from its seed to its end: the head, the actors around it, the faults and the witness."""

import random
from collections import Counter
from dataclasses import dataclass, replace

from areal_bus import messages as m
from areal_bus.core.effects import Discard, Divide, Effect, End, EvictForGood, Mark, Record, Save, Send
from areal_bus.core.evaluation import has_stopped_improving, history
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.state import HeadState
from areal_bus.errors import ArealBusError
from areal_bus.messages import Role
from areal_lab.staleness.simulator.disk import Disk, Writer
from areal_lab.staleness.simulator.generator import SharedRecords, SimulatedGenerator
from areal_lab.staleness.simulator.learner import Learners
from areal_lab.staleness.simulator.reward import SimulatedReward
from areal_lab.staleness.simulator.scenario import Fault, Scenario
from areal_lab.staleness.simulator.witness import Witness
from areal_lab.staleness.simulator.witness_records import Violation
from areal_lab.staleness.simulator.world import HEAD, World

MAX_EVENTS = 2_000_000
WATCH_S = 40.0
BEAT, DEAF = m.Heartbeat(0, None, ""), m.Heartbeat(0, None, "", hears=False)


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """The result of a schedule."""

    end: End | None  # None if the job did not end
    violations: list[Violation]
    n_events: int
    seconds: float  # virtual


class Ring:
    """Runs one scenario. Tests replace the head (to break a rule) or the world (to change the order of events)."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        keeps_story: bool = False,
        head_class: type[Head] = Head,
        world_class: type[World] = World,
    ) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed * 2 + 1)
        self.world = world_class(
            self.rng,
            link_s=scenario.link_s,
            p_lost=scenario.p_lost,
            p_twice=scenario.p_twice,
            calm_s=scenario.calm_s,
            keeps_story=keeps_story,
        )
        self.disk = Disk()
        self._head_class = head_class
        self._rules = replace(scenario.rules, lease_secret=b"simulated")
        self.disk.split, self.disk.keeps_good = self._rules.split, scenario.on_collapse != "warn"
        self.head = head_class(HeadState(self._rules, scenario.data_source()), now=0.0)
        self.witness = Witness(scenario, self.head)
        self.learners = Learners(self.world, scenario, self.rng, self.witness.trained, self.disk)
        self.learners.restarted = lambda index, incarnation: self._come_back(Role.LEARNER, index, incarnation)
        self.witness.learners = self.learners
        self._n_heads = 1
        self._drains = False  # the job drains: every head gets the signal
        self._writer = self._new_writer()
        self.end: End | None = None
        self.records: list[tuple[float, Record]] | None = None  # all records, if a caller sets a list
        self.names: dict[tuple[Role, int], str] = {}  # live processes
        self.n_faults: Counter[str] = Counter()  # faults that had a live target
        self._moved_s = 0.0  # time of the last finished update
        self.stalled: Violation | None = None

    # the run

    def run(self) -> ScheduleOutcome:
        """Run to the end of the job, or until all actors wait."""
        self._begin()
        world = self.world
        try:
            while self.end is None and self.stalled is None:
                world.step()
        except ArealBusError as impossible:
            self.stalled = Violation("I11", f"an actor ended with an error: {impossible}", world.now)
        if self.stalled is not None:
            self.witness.violations.append(self.stalled)
        else:
            self._check_end()
        return ScheduleOutcome(self.end, self.witness.violations, world.n_events, world.now)

    def _stalled(self) -> Violation | None:
        """I11: after the last fault an update comes within a bounded time, or the job ends."""
        world, scenario = self.world, self.scenario
        since = max(self._moved_s, scenario.calm_s, *scenario.joins_s, 0.0)
        if world.now - since <= scenario.patience_s and world.n_events < MAX_EVENTS:
            return None
        counts = {str(state): n for state, n in self.head.state.ledger.counts.items() if n}
        gate = self.head.state.gate
        where = f"{self.head.state.phase}, u {gate.u}, v {gate.v}, w {gate.w}, {counts}"
        return Violation("I11", f"no update for {world.now - since:.0f} s and no end: {where}", world.now)

    def _check_end(self) -> None:
        end, witness, scenario = self.end, self.witness, self.scenario
        witness.now = self.world.now
        if end is None:
            return
        if end.code == 0:
            witness.end()
            u = self.head.state.gate.u
            done = (u == scenario.total_steps and not scenario.rejects_all) or self.head.state.rows.is_exhausted
            values = history("", scenario.rules.evaluate_metric, self.head.state.figures)
            done = done or has_stopped_improving(values, patience=scenario.evaluate_patience)
            done = done or bool(self.head.state.stopped)
            witness.check("I11", done, "ended well at update {}, without a reason", u)
        else:
            witness.check("I11", witness.excuses.explain(end.sentence), "ended in error: {}", end.sentence)

    # the beginning

    def _begin(self) -> None:
        scenario, world = self.scenario, self.world
        world.nodes[HEAD] = self
        for i in range(scenario.n_learners):
            world.at(self.rng.uniform(0, 2), self._start, Role.LEARNER, i, 0)
        for i in range(scenario.n_rewards):
            world.at(self.rng.uniform(0, 2), self._start, Role.REWARD, i, 0)
        for i in range(scenario.n_generators):
            joins_s = scenario.joins_s[i] if i < len(scenario.joins_s) else self.rng.uniform(0, 2)
            world.at(joins_s, self._start, Role.GENERATOR, i, 0)
        for fault in scenario.faults:
            world.at(fault.at_s, self._inflict, fault)
        self._start_clocks()
        world.at(WATCH_S, self._watch)

    def _end_of(self, name: str) -> None:
        """A generator left, was evicted, or a prompt killed it: another one takes its place."""
        index, incarnation = (int(number) for number in name.partition("-")[2].split("."))
        if self.names.get((Role.GENERATOR, index)) == name:
            self._come_back(Role.GENERATOR, index, incarnation + 1)

    def _come_back(self, role: Role, index: int, incarnation: int) -> None:
        """The supervisor starts it again."""
        delay = self.rng.uniform(0.5, 3.0)
        self.names.pop((role, index), None)
        self.world.at(self.world.now + delay, self._start, role, index, incarnation)

    def _seated(self, role: Role, index: int) -> tuple[Role, int]:
        """Who runs at the place of this actor, in the split that is on disk."""
        pool, split = self.scenario.pool, self.disk.split
        if pool is None or split is None or pool.has_place(role, index, split):
            return role, index
        other = Role.GENERATOR if role is Role.LEARNER else Role.LEARNER
        return other, pool.learners + pool.generators - 1 - index

    def _start(self, role: Role, index: int, incarnation: int) -> None:
        """A process comes up: Join at once, Ready when it has loaded."""
        role, index = self._seated(role, index)
        name = f"{role}-{index}.{incarnation}"
        world = self.world
        if role is Role.LEARNER:
            self.names[role, index] = name
            world.tell(f"{name} starts", None)
            self.learners.start(index, incarnation)
            world.timer(name, self.scenario.heartbeat_s, self._beat, name)
            return
        if role is Role.GENERATOR:
            shared = SharedRecords(self.learners.weights, self.witness.reports)
            generator = SimulatedGenerator(world, self.scenario, name, self.rng, shared, self._end_of)
            self.witness.generators[name] = world.nodes[name] = generator
        else:
            reward = SimulatedReward(world, self.scenario, name, self.rng)
            self.witness.rewards.append(reward)
            world.nodes[name] = reward
        self.names[role, index] = name
        world.tell(f"{name} starts", None)
        world.send(name, HEAD, m.Join(name, role, index, incarnation, "" if role is Role.GENERATOR else name, 1, ""))
        world.timer(name, self.rng.uniform(0, 2), world.send, name, HEAD, m.Ready(self.scenario.capacity))
        world.timer(name, self.scenario.heartbeat_s, self._beat, name)

    def _beat(self, name: str) -> None:
        silence_s = self.world.now - self.world.heard.get(name, self.world.now)
        self.world.send(name, HEAD, BEAT if silence_s <= self.scenario.silent_s else DEAF)
        self.world.timer(name, self.scenario.heartbeat_s, self._beat, name)

    # faults

    def _inflict(self, fault: Fault) -> None:
        if fault.role is Role.HEAD:
            self._inflict_on_head(fault)
            return
        name = self.names.get((fault.role, fault.index))
        if name is None or name not in self.world.nodes:
            return
        self.n_faults[f"{fault.kind} of {fault.role}"] += 1
        self.world.tell(f"{fault.kind} of {name} for {fault.for_s:.1f} s", None)
        if fault.kind in ("crash", "tear"):
            self._crash(fault.role, fault.index, fault.for_s)
            if fault.kind == "tear" and self.scenario.checkpoint_keep > 1:
                self.disk.tear()
        elif fault.kind == "leave":
            self.witness.generators[name].leave()
        elif fault.kind == "stop":
            self.world.stop(name, fault.for_s)
        elif fault.kind == "deaf":
            self.world.deafen(name, fault.for_s)
        elif fault.kind == "reset":
            self.world.break_connection(name)
        else:
            self.world.cut(name, fault.for_s)

    def _crash(self, role: Role, index: int, for_s: float) -> None:
        """The process dies and restarts as a new incarnation. The head may be informed, or not (a dead host)."""
        name = self.names.pop((role, index), None)
        if name is not None:
            self.world.crash(name)
            if self.rng.random() < 0.7:
                self.world.say_gone(name)
            incarnation = int(name.rpartition(".")[2]) + 1
            self.world.at(self.world.now + for_s, self._start, role, index, incarnation)

    def _inflict_on_head(self, fault: Fault) -> None:
        self.world.tell(f"{fault.kind} of the head for {fault.for_s:.1f} s", None)
        if HEAD not in self.world.nodes or self.end is not None:
            return
        self.n_faults[f"{fault.kind} of head"] += 1
        if fault.kind == "stop":
            self.world.stop(HEAD, fault.for_s)
        elif fault.kind == "cut":
            self.world.cut(HEAD, fault.for_s)
        elif fault.kind == "drain":
            self._drains = True
            self.carry_out(self.head.drain(self.world.now))
        else:
            self._crash_head(fault.for_s, everybody=fault.kind == "kill")

    def _crash_head(self, for_s: float, *, everybody: bool) -> None:
        """The head loses its memory and unsynced writes."""
        self.world.crash(HEAD)
        self.world.lose_under_way(HEAD)
        self._n_heads += 1
        self._writer.is_gone = True
        self.learners.drained = None
        self.world.at(self.world.now + for_s, self._start_head)
        if everybody:
            self.learners.held = {}  # with their supervisors
            self.disk.evicted = ()  # by a head of another start
            self.witness.excuses.gone.clear()
        for role, index in list(self.names) if everybody else ():
            self._crash(role, index, for_s + self.rng.uniform(0, 2))

    def _start_head(self) -> None:
        term = 0 if self.disk.term is None else self.disk.term + 1
        source = self.scenario.data_source()
        now = self.world.now
        state = HeadState(
            self._rules if self.disk.split is None else self._rules.in_split(self.disk.split),
            source,
            incarnation=self._n_heads - 1,
            term=term,
            checkpoints=self.disk.whole,
            savepoints=self.disk.waypoints.values(),
        )
        state.remember(self.disk.rollback)
        state.evicted.update(self.disk.evicted)
        self.head = self._head_class(state, now=now)
        self.witness.follow(self.head)
        self._writer = self._new_writer()
        self.world.nodes[HEAD] = self
        self._start_clocks()
        if self._drains:
            self.carry_out(self.head.drain(now))

    # the head

    def _new_writer(self) -> Writer:
        return Writer(self.world, self.scenario, self.rng, self.disk, self.head.state.terms)

    def _start_clocks(self) -> None:
        self.world.timer(HEAD, self.scenario.tick_s, self._tick, self._n_heads)
        self.world.timer(HEAD, 2 * self.scenario.heartbeat_s, self._beat_head, self._n_heads)

    def receive(self, sender: str, message: m.Message) -> None:
        if type(message) is m.PushDone:
            self.witness.hear(sender, message)
        if effects := self.head.on(sender, message, self.world.now):
            self.carry_out(effects)

    def _tick(self, n_heads: int) -> None:
        if n_heads == self._n_heads and self.end is None:
            self.carry_out(self.head.tick(self.world.now))
            self.world.timer(HEAD, self.scenario.tick_s, self._tick, n_heads)

    def _beat_head(self, n_heads: int) -> None:
        if n_heads == self._n_heads and self.end is None:
            beat = m.HeadHeartbeat(self.head.state.terms.term, self.head.state.gate.v, self.head.state.incarnation)
            for name in self.names.values():
                self.world.send(HEAD, name, beat)
            self.world.timer(HEAD, 2 * self.scenario.heartbeat_s, self._beat_head, n_heads)

    def _watch(self) -> None:
        self.stalled = self._stalled()
        self.world.at(self.world.now + WATCH_S, self._watch)

    def carry_out(self, effects: list[Effect]) -> None:
        witness = self.witness
        witness.now = self.world.now
        for effect in effects:
            witness.see(effect)
            if type(effect) is Send:
                self.world.send(HEAD, effect.to, effect.message)
            elif type(effect) is Record:
                self._record(effect)
            elif isinstance(effect, Save | Discard):
                self._writer.do(effect)
            elif isinstance(effect, Divide):
                self._writer.flush()
                self.disk.divide(effect)
            elif isinstance(effect, EvictForGood):
                self.disk.evicted = effect.generators
            elif isinstance(effect, Mark):
                fails = self.scenario.p_disk > 0 and self.rng.random() < self.scenario.p_disk
                self.disk.mark(effect.savepoint, fails=fails)
            elif isinstance(effect, End):
                self._on_end(effect)

    def _record(self, line: Record) -> None:
        if line.event is Event.UPDATE:
            self._moved_s = self.world.now
        elif line.event is Event.COLLAPSE:
            self.disk.rollback = self.head.state.rollback
        elif line.event is Event.TERM:
            self.disk.term = line.fields["term"]
            self._writer.flush()  # removes head checkpoints of the lost timeline before any process receives the term
        if self.world.story is not None:
            self.world.tell(str(line.event), line.fields)
        if self.records is not None:
            self.records.append((self.world.now, line))

    def _on_end(self, end: End) -> None:
        """A drained job is started again by the same command line."""
        if not self.head.state.is_draining or end.code:
            self.end = end
            return
        self._writer.flush()
        drained, newest = self.learners.drained, self.disk.newest
        self._drains = False
        if drained is not None and not self._writer.has_failed:
            self.witness.check("I4", newest == drained, "drained at {}, on disk is {}", drained, newest)
        self._crash_head(5.0, everybody=True)
