"""Actors that do what they are told, when they are told: no clock, no order but what the protocol demands.

What an actor is sent waits until it reads; what it says goes out at once.
"""

from collections import deque
from typing import TYPE_CHECKING

from areal_bus import messages as m
from areal_bus.core.parts.partial_rollouts import SampleOffers
from areal_bus.core.parts.reward_parts import dumped, of_roles
from areal_bus.core.parts.staleness import runs_under
from areal_bus.core.parts.terms import TermHistory
from areal_bus.messages import Role
from areal_lab.staleness.simulator.generator import episode
from areal_lab.staleness.simulator.learner import MODEL
from areal_lab.staleness.simulator.reward import role_rewards
from areal_lab.staleness.simulator.sample import Key, SimulatedReport, SimulatedSample, report, report_number
from areal_lab.staleness.simulator.world import REPEATED

if TYPE_CHECKING:
    from tests.invariants.head_stage import Stage


class Actor:
    """One incarnation. It speaks at once; what it is sent waits in its inbox."""

    role: Role

    def __init__(self, stage: "Stage", index: int, incarnation: int) -> None:
        self.stage, self.index, self.incarnation = stage, index, incarnation
        self.name = f"{self.role}-{index}.{incarnation}"
        self.inbox: deque[m.Message] = deque()
        self.n_joins = 0  # after the first one
        self.life: int | None = None  # of the head, as it said last
        self.listed: list[str] = []  # who listens, as it said last

    def say(self, message: m.Message) -> None:
        if self.is_there:
            self.stage.say(self.name, message)

    def come_up(self) -> None:
        """Whoever comes up joins; some are ready at once."""
        self.join()

    def join(self) -> None:
        endpoint = "" if self.role is Role.GENERATOR else self.name
        self.say(m.Join(self.name, self.role, self.index, self.incarnation, endpoint, 1, "", self.n_joins))

    def read(self, n: int = 10**9, *, loses: bool = False) -> None:
        """The next messages. Of those that somebody repeats the first one may be lost."""
        while self.inbox and n and self.is_there:
            message = self.inbox.popleft()
            n -= 1
            if loses and type(message) in REPEATED:
                loses = False
            elif isinstance(message, m.Rejoin):
                self.rejoin(message)
            elif isinstance(message, m.PeerList) and self.life not in (None, message.life):
                self.rejoin(message)
                self.life, self.listed = message.life, message.names
            elif isinstance(message, m.PeerList):
                self.life, self.listed = message.life, message.names
            elif isinstance(message, m.Stop | m.Evict):
                self.end()
            else:
                self.take(message)

    @property
    def is_there(self) -> bool:
        return self.stage.cast.get((self.role, self.index)) is self

    def end(self) -> None:
        self.stage.cast.pop((self.role, self.index), None)

    def rejoin(self, message: m.Rejoin | m.PeerList) -> None:
        """The head is another one, or what it said was lost."""
        self.n_joins += 1
        self.join()

    def take(self, message: m.Message) -> None:
        """What only some roles are sent."""


class RewardModel(Actor):
    """Judges whatever was made; keeps nothing but which values it gave."""

    role = Role.REWARD

    def __init__(self, stage: "Stage", index: int, incarnation: int) -> None:
        self.values: dict[tuple[int, int, int], set[float]] = {}
        self.failures: dict[tuple[int, int, int], set[str]] = {}
        super().__init__(stage, index, incarnation)
        stage.witness.rewards.append(self)  # type: ignore[arg-type]

    def join(self) -> None:
        super().join()
        self.say(m.Ready(4))

    def judge(self, t: m.Trajectory, status: str) -> None:
        reward = float(hash((t.uid, t.sample, t.attempt)) % 1000)
        if status == "value":
            self.values.setdefault((t.uid, t.sample, t.attempt), set()).add(reward)
        else:
            self.failures.setdefault((t.uid, t.sample, t.attempt), set()).add(status)
        self.say(
            m.Scored(
                status, reward, None, "" if status == "value" else "no value", 0.0, t.uid, t.sample, t.attempt,
                t.evaluation, t.generator, t.finish, t.segments, t.spans, t.seconds, t.term, t.ids, t.logps, "", "",
                trajectories=t.trajectories, roles=t.roles,
                parts=dumped(of_roles(role_rewards(t.roles, reward)) if status == "value" else {}),
            )
        )  # fmt: skip


class GeneratorModel(Actor):
    """Makes a token when it is told to, by the weights it holds then; keeps and ends samples as terms demand."""

    role = Role.GENERATOR

    def __init__(self, stage: "Stage", index: int, incarnation: int) -> None:
        self.version: int | None = None
        self.weights = ""
        self.finished: dict[Key, SimulatedSample] = {}
        self.running: dict[Key, SimulatedSample] = {}
        self.kept: dict[Key, m.Trajectory] = {}
        self.push: m.PushBegin | None = None
        self.timeline = TermHistory()
        self.is_ready = self.is_leaving = False
        self._offers = SampleOffers()
        self._known: set[Key] = set()
        self._begun: dict[Key, SimulatedReport] = {}
        super().__init__(stage, index, incarnation)
        stage.witness.generators[self.name] = self  # type: ignore[assignment]

    def rejoin(self, message: m.Rejoin | m.PeerList) -> None:
        if self._reports:
            ended = [self._partial(self.finished[key], less=1) for key in self.kept if self.finished[key].made > 1]
            begun = [self._partial(sample) for sample in self.running.values() if sample.made]
            self._offers.keep([x for x in ended + begun if x is not None], self.timeline)
        for held in (self.running, self.kept, self._begun):
            held.clear()
        self.push, self.version, self.timeline = None, None, TermHistory()
        super().rejoin(message)
        if self.is_ready:
            self.get_ready()
        if self.is_leaving:
            self.say(m.LeaveRequest())

    def get_ready(self) -> None:
        self.is_ready = True
        self.say(m.Ready(self.stage.plan.capacity))

    def take(self, message: m.Message) -> None:
        if isinstance(message, m.Prompt):
            for sample in message.samples:
                self._begin((message.evaluation, message.uid, message.attempt, sample))
        elif isinstance(message, m.Partial):
            begun = self.stage.witness.reports[report_number(message)]
            self._begun["", message.uid, message.attempt, message.sample] = begun
        elif isinstance(message, m.Ack):
            self.kept.pop((message.evaluation, message.uid, message.attempt, message.sample), None)
        elif isinstance(message, m.Cancel):
            self._drop((message.evaluation, message.uid, message.attempt))
        elif isinstance(message, m.Term):
            self._follow(message.term, message.version)
            self._offer(message.term, message.version)
        elif isinstance(message, m.PushBegin):
            self._follow(message.term, message.base)
            self._offer(message.term, message.base)
            newer = self.push is None or message.push > self.push.push
            if message.term == self.timeline.term and newer:
                self.push = message

    def _begin(self, key: Key) -> None:
        if key in self._known:
            return
        self._known.add(key)
        begun = self._begun.pop(key, None)
        self.running[key] = SimulatedSample(key, 0)
        if begun is not None and self.version is not None and begun.spans[-1][0] <= self.version:
            made = sum(n for _, n in begun.spans)
            spans = [list(span) for span in begun.spans]
            self.running[key] = SimulatedSample(
                key, 0, made=made, spans=spans, made_by=list(begun.made_by), n_done=made
            )

    def _drop(self, group: tuple[str, int, int]) -> None:
        for held in (self.running, self.kept):
            for key in [key for key in held if key[:3] == group]:
                del held[key]

    def _follow(self, term: int, base: int) -> None:
        if not self.timeline.begin(term, base):
            return
        self._begun.clear()
        self.push = None
        spans = [
            *((key, x.spans) for key, x in self.running.items()),
            *((key, t.spans) for key, t in self.kept.items()),
        ]
        for group in sorted({key[:3] for key, made in spans if not self.timeline.keeps(newest(made))}):
            self._drop(group)
            self.say(m.SampleFailed(group[1], group[2], group[0], m.Refund.LOST_TIMELINE, f"term {term}"))
        if not self.timeline.keeps(self.version):
            self.version = None

    def decode(self, key: Key) -> None:
        """One token."""
        sample = self.running.get(key)
        if sample is None or self.version is None:
            return
        sample.made += 1
        if sample.spans and sample.spans[-1][0] == self.version:
            sample.spans[-1][1] += 1
        else:
            sample.spans.append([self.version, 1])
        sample.made_by.append((self.version, self.weights))

    def finish(self, key: Key, *, tells: bool) -> None:
        """Its last token was made. The note that it is sampled may be lost."""
        sample = self.running.get(key)
        if sample is None or not sample.made:
            return
        del self.running[key]
        self.finished[key] = sample
        evaluation, uid, attempt, number = key
        segments, trajectories, roles = episode(uid, number, sample.made)
        self.kept[key] = trajectory = m.Trajectory(
            uid, number, attempt, evaluation, self.name, "stop", segments, sample.spans, 0.0,
            self.timeline.term, b"", bytes(4 * sample.made), "", "", "", trajectories=trajectories, roles=roles,
        )  # fmt: skip
        self.stage.made.append(trajectory)
        if tells:
            self.say(m.Sampled(uid, number, attempt, evaluation, sample.made))

    def give_up(self, key: Key) -> None:
        """It cannot make this group."""
        self._drop(key[:3])
        self.say(m.SampleFailed(key[1], key[2], key[0], m.Refund.SAMPLING_ERROR, "it cannot"))

    @property
    def _reports(self) -> bool:
        return self.stage.plan.report_tokens > 0 and self.stage.plan.eta > 0

    def _report(self) -> None:
        """What there is of every training sample."""
        for sample in self.running.values():
            if sample.made and (partial := self._partial(sample)) is not None:
                self.say(partial)

    def _partial(self, sample: SimulatedSample, *, less: int = 0) -> m.Partial | None:
        evaluation, uid, attempt, number = sample.key
        if evaluation:
            return None
        reports, made = self.stage.witness.reports, sample.made - less
        reports.append(report(sample, less=less))
        ids, logps = (len(reports) - 1).to_bytes(4, "little") + bytes(4 * made), bytes(4 * made)
        return m.Partial(uid, number, attempt, self.timeline.term, [[1, made]], reports[-1].spans, ids, logps)

    def _offer(self, term: int, base: int) -> None:
        """What was held for an earlier head, as far as it is valid in this one's term."""
        for partial in self._offers.take(term, base):
            self.say(partial)

    def end_push(self, how: str) -> None:
        """How it ends: done, broken, wrong (other weights came) or silent (the word of what is here is lost)."""
        begin, self.push = self.push, None
        if begin is None:
            return
        if how == "broken":
            self.say(m.PushBroken(begin.push, begin.version, "the group broke"))
        elif how == "wrong":
            self.say(m.PushDone(begin.push, begin.version, "other weights", 0.0, 0.0))
        else:
            self.version = begin.version
            self.weights = self.stage.weights.get((begin.store, begin.version), "")
            if how == "done":
                self.say(m.PushDone(begin.push, begin.version, self.weights, 0.0, 0.0))
            if self._reports:
                self._report()

    def leave(self) -> None:
        self.is_leaving = True
        self.say(m.LeaveRequest())


class LearnerModel(Actor):
    """A rank: all begin together at the newest checkpoint, ask, train and update; rank 0 speaks for them."""

    role = Role.LEARNER

    def __init__(self, stage: "Stage", index: int, incarnation: int) -> None:
        self.version: int | None = None  # None before it has begun
        self.root = ""  # rank 0 of those that it began with
        self.items: list[m.ShardItem] = []
        self.share: m.ShardEnd | None = None
        self.is_due = False  # a checkpoint of its version is not written yet
        self.asks = False  # it waits for a batch
        self.asked: int | None = None  # life of the head that its crew asks
        self.began_at = 0  # the version that it came up with
        self.pushes: list[m.PushBegin] = []
        self.has_finished = False
        super().__init__(stage, index, incarnation)

    def rejoin(self, message: m.Rejoin | m.PeerList) -> None:
        """It cannot forget: it ends, or outlives its head."""
        is_told_so = isinstance(message, m.Rejoin) and (message.anew or message.life == self.life)
        if self.version is None or is_told_so:
            self.end()
        elif isinstance(message, m.Rejoin):
            self.n_joins = message.life
            self.join()

    @property
    def crew(self) -> "list[LearnerModel]":
        """All that it computes with, rank 0 first; none when one of them is gone."""
        crew = [rank for rank in self.stage.learners if rank.root == self.root]
        return crew if len(crew) == self.stage.plan.n_learners else []

    def _go_over(self) -> None:
        """Its head is gone: all of its crew that have joined the next one say where they are."""
        crew = self.crew
        if not crew:
            self.end()  # a collective breaks
        elif len({rank.life for rank in crew}) == 1:
            for rank in crew:
                rank.asked, rank.asks, rank.has_finished, rank.share = self.life, False, False, None
                rank.items.clear()
                rank.say(m.Ready(0))
            crew[0].say_begin(lives_on=(self.version or 0) > self.began_at)

    def say_begin(self, *, lives_on: bool) -> None:
        stage, version = self.stage, self.version or 0
        weights = stage.weights[self.name, version]
        stage.begun = (version, weights)
        self.say(m.BeginTerm(version, weights, self.asked or 0, lives_on, sorted(stage.disk.checkpoints)))

    def take(self, message: m.Message) -> None:
        if isinstance(message, m.ShardItem):
            self.items.append(message)
        elif isinstance(message, m.ShardEnd):
            self.share = message
        elif isinstance(message, m.PushBegin):
            self.pushes.append(message)
        elif isinstance(message, m.NoBatch):
            if message.drained and self.version not in self.stage.disk.checkpoints and self.version:
                self.checkpoint()
            if message.drained and self.life == self.stage.head.state.incarnation and not self.index:
                self.stage.drained = self.version
            self.has_finished = True
            self.say(m.Finished("", ""))

    def go_on(self) -> None:
        """The next thing that it has to do."""
        if self.version is None:
            self._begin()
        elif self.share is not None and self._update():
            pass
        elif self.is_due:
            self.checkpoint()
        elif self.asked != self.life:
            self._go_over()
        elif not self.asks and not self.has_finished:
            self.asks = True
            self.say(m.BatchRequest(self.version, self.asked or 0))

    def _begin(self) -> None:
        """When all are there, and none is left of an earlier crew."""
        disk, stage = self.stage.disk, self.stage
        crew = stage.learners
        ready = [rank for rank in crew if rank.version is None and (rank is self or self.name in rank.listed)]
        if self.index or len(ready) < stage.plan.n_learners:
            return
        version = disk.newest
        disk.checkpoints = {other: w for other, w in disk.checkpoints.items() if other <= version}
        stage.weights[self.name, version] = disk.checkpoints.get(version, MODEL)
        for rank in crew:
            rank.version, rank.root, rank.asked, rank.began_at = version, self.name, self.life, version
            rank.say(m.Ready(0))
        self.say_begin(lives_on=False)

    def _update(self) -> bool:
        """When each rank of the crew has its share of the same batch."""
        crew, share = self.crew, self.share
        steps = {None if rank.share is None else rank.share.step for rank in crew}
        if share is None or steps != {share.step}:
            return False
        for item in [item for rank in crew for item in rank.items]:
            runs = runs_under(self.stage.plan.policy, item.spans, item.clock, self.stage.plan.eta)
            self.stage.witness.trained(item, runs)
        root, version, every = crew[0], share.step + 1, self.stage.plan.checkpoint_every
        weights = self.stage.weights[root.name, version] = f"{version} of {root.name}"
        for rank in crew:
            rank.version, rank.share, rank.asks = version, None, False
            rank.items.clear()
        root.is_due = every > 0 and version % every == 0
        root.say(m.UpdateDone(version, {}, weights))
        for rank in crew if share.last else ():
            rank.has_finished = True
            rank.say(m.Finished("", ""))
        return True

    def checkpoint(self) -> None:
        """Rank 0 writes it."""
        if self.version is None or self.index:
            return
        self.is_due = False
        weights = self.stage.weights[self.name, self.version]
        self.stage.disk.seal(self.version, weights, self.stage.plan.checkpoint_keep)
        self.say(m.Checkpointed(self.version, ""))

    def end_push(self, how: str) -> None:
        """The root's part of the oldest push that it was told of."""
        if not self.pushes or self.version is None:
            return
        begin = self.pushes.pop(0)
        weights = self.stage.weights.get((self.name, begin.version))
        if how == "broken" or weights is None:
            self.say(m.PushBroken(begin.push, begin.version, "the group broke"))
        elif how != "silent":
            self.say(m.PushDone(begin.push, begin.version, weights, 0.0, 0.0))


def newest(spans: list[list[int]]) -> int | None:
    return max((version for version, _ in spans), default=None)
