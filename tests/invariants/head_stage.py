"""A head and its disk among actors: what anybody says goes to the head at once, in any order that its caller likes.

What actors made stays true: any reward may judge it at any time, and again. The simulator's witness sees every effect
and every token.
"""

from collections.abc import Iterator

from areal_bus import messages as m
from areal_bus.core.effects import Discard, Effect, End, Mark, Record, Save, Send
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.state import HeadState
from areal_bus.messages import Role
from areal_lab.staleness.simulator.disk import Disk
from areal_lab.staleness.simulator.learner import MODEL
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.witness import Witness
from areal_lab.staleness.simulator.world import REPEATED
from tests.invariants.head_actors import Actor, GeneratorModel, LearnerModel, RewardModel

MODELS: dict[Role, type[Actor]] = {Role.LEARNER: LearnerModel, Role.REWARD: RewardModel, Role.GENERATOR: GeneratorModel}


class Stage:
    """The head, its disk and who is there; everything that anybody says goes to the head at once."""

    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.now = 0.0
        self.disk = Disk()
        self.pending: list[Save | Discard] = []  # not on disk yet
        self.weights: dict[tuple[str, int], str] = {}  # (learner, version) -> which weights
        self.begun = (0, MODEL)
        self.drained: int | None = None
        self.made: list[m.Trajectory] = []  # whatever any generator ever finished
        self.said: list[tuple[str, m.Message]] = []  # to this head, what may come twice
        self.end: End | None = None
        self.n_lives = {(role, i): 0 for role, n in self._sizes() for i in range(n)}
        self.cast: dict[tuple[Role, int], Actor] = {}
        self.head = Head(HeadState(plan.rules, plan.data_source()), now=0.0)
        self.witness = Witness(plan, self.head)
        self.witness.learners = self  # type: ignore[assignment]
        for role, index in self.n_lives:
            self.start(role, index)

    def _sizes(self) -> Iterator[tuple[Role, int]]:
        yield Role.LEARNER, self.plan.n_learners
        yield Role.REWARD, self.plan.n_rewards
        yield Role.GENERATOR, self.plan.n_generators

    def start(self, role: Role, index: int) -> Actor:
        """A new incarnation comes up."""
        self.cast.pop((role, index), None)
        incarnation = self.n_lives[role, index]
        self.n_lives[role, index] += 1
        actor = self.cast[role, index] = MODELS[role](self, index, incarnation)
        actor.come_up()
        return actor

    def of(self, role: Role) -> list[Actor]:
        return [actor for (other, _), actor in sorted(self.cast.items()) if other is role]

    @property
    def generators(self) -> list[GeneratorModel]:
        return [actor for actor in self.of(Role.GENERATOR) if isinstance(actor, GeneratorModel)]

    @property
    def learners(self) -> list[LearnerModel]:
        return [actor for actor in self.of(Role.LEARNER) if isinstance(actor, LearnerModel)]

    @property
    def learner(self) -> LearnerModel | None:
        actor = self.cast.get((Role.LEARNER, 0))
        return actor if isinstance(actor, LearnerModel) else None

    # the head

    def say(self, sender: str, message: m.Message) -> None:
        if self.end is None:
            if type(message) in REPEATED:
                self.said.append((sender, message))
            if isinstance(message, m.PushDone):
                self.witness.hear(sender, message)
            self.carry_out(self.head.on(sender, message, self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        self.witness.now = self.now
        for effect in effects:
            self.witness.see(effect)
            if isinstance(effect, Send):
                self._deliver(effect.to, effect.message)
            elif isinstance(effect, Record) and effect.event is Event.TERM:
                self.disk.term = effect.fields["term"]
                self.write(len(self.pending))
            elif isinstance(effect, Save | Discard):
                self.pending.append(effect)
            elif isinstance(effect, Mark):
                self.disk.mark(effect.savepoint)
            elif isinstance(effect, End):
                self._on_end(effect)

    def _deliver(self, to: str, message: m.Message) -> None:
        for actor in self.cast.values():
            if actor.name == to:
                actor.inbox.append(message)

    def write(self, n: int) -> None:
        """The next frontiers are on disk, or gone from it."""
        for effect in self.pending[:n]:
            if isinstance(effect, Save):
                self.disk.frontiers[effect.checkpoint.version] = effect.checkpoint
                self.head.state.terms.saved(effect.checkpoint)
            else:
                for version in effect.versions:
                    self.disk.frontiers.pop(version, None)
        del self.pending[:n]

    def crash_head(self) -> None:
        """What it had in memory is lost, and what was not written."""
        self.pending.clear()
        self.said.clear()
        self.drained = None
        term = 0 if self.disk.term is None else self.disk.term + 1
        life = self.head.state.incarnation + 1
        source = self.plan.data_source()
        whole, waypoints = self.disk.whole, self.disk.waypoints.values()
        self.head = Head(
            HeadState(self.plan.rules, source, incarnation=life, term=term, checkpoints=whole, savepoints=waypoints),
            now=self.now,
        )
        self.witness.follow(self.head)

    def kill_all(self) -> None:
        """The whole job, which is resumed."""
        self.cast.clear()
        self.crash_head()
        for role, index in self.n_lives:
            self.start(role, index)

    def _on_end(self, end: End) -> None:
        if end.code or not self.head.state.is_draining:
            self.end = end
            return
        self.write(len(self.pending))
        if self.drained is not None:
            self.witness.check("I4", self.disk.newest == self.drained, f"drained at {self.drained}, {self.disk.newest}")
        self.kill_all()

    def wait(self, seconds: float, quiet: Actor | None = None) -> None:
        """Everybody but one beats meanwhile; the head looks at the time again and again."""
        until = self.now + seconds
        while self.now < until and self.end is None:
            self.now = min(until, self.now + self.plan.silent_s / 4)
            for actor in list(self.cast.values()):
                if actor is not quiet:
                    actor.say(m.Heartbeat(0, None, ""))
            self.carry_out(self.head.tick(self.now))

    def flow(self, without: str = "") -> None:
        """Everybody who is there does what is next, but for some; the word of it arrives."""
        for generator in self.generators:
            if generator.index or without != "generator 0":
                self._flow_through(generator, swaps=without != "pushes")
        if without != "rewards":
            self._judge()
        if without != "disk":
            self.write(len(self.pending))
        for learner in self.learners if without != "learner" else ():
            learner.read()
            learner.go_on()
            if without != "pushes":
                learner.end_push("done")

    @staticmethod
    def _flow_through(generator: GeneratorModel, *, swaps: bool) -> None:
        generator.read()
        if not generator.is_ready:
            generator.get_ready()
        if swaps:
            generator.end_push("done")
        for key in list(generator.running) if generator.version is not None else ():
            generator.decode(key)
            if generator.running[key].made > 3 * (key[1] % 3):  # some are long enough to live through swaps
                generator.finish(key, tells=True)

    def _judge(self) -> None:
        judges = [actor for actor in self.of(Role.REWARD) if isinstance(actor, RewardModel)]
        for judge in judges:
            judge.read()
        for trajectory in [t for generator in self.generators for t in generator.kept.values()] if judges else ():
            judges[0].judge(trajectory, "value")

    def recover(self, rounds: int = 80) -> bool:
        """Nothing goes wrong any more. Whether an update comes, or the job ends (I11)."""
        before = self.head.state.gate.u
        for _ in range(rounds):
            for role, index in self.n_lives:
                if (role, index) not in self.cast and self.end is None:
                    self.start(role, index)
            self.flow()
            self.wait(4.0)
            if self.end is not None or self.head.state.gate.u > before:
                return True
            before = min(before, self.head.state.gate.u)
        return False


def plan_of(**drawn: object) -> Scenario:
    """No time but silence and deadlines; faults are up to whoever holds the stage."""
    standard: dict[str, object] = {"seed": 0, "calm_s": 1e9, "silent_s": 20.0, "push_timeout_s": 60.0}
    return Scenario(**(standard | drawn))  # type: ignore[arg-type]
