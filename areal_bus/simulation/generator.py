"""A generator without a model: samples take time, each token is stamped with the version held when it is made.

As the real one it keeps a trajectory until the head acknowledges it, sends it again to another reward meanwhile, and
ends what it is told to cancel.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from areal_bus import messages as m
from areal_bus.simulation.scenario import Scenario
from areal_bus.simulation.world import HEAD, World

Key = tuple[str, int, int, int]  # evaluation, uid, attempt, sample
NO_BYTES = b""


@dataclass(slots=True)
class Sample:
    """One sample being decoded."""

    key: Key
    n_tokens: int
    began: float = 0.0
    made: int = 0  # tokens that `spans` holds
    spans: list[list[int]] = field(default_factory=list)
    n_starts: int = 0


class Generator:
    """One incarnation."""

    def __init__(self, world: World, scenario: Scenario, name: str, rng: random.Random) -> None:
        self.world, self.scenario, self.name, self.rng = world, scenario, name, rng
        self.version: int | None = None
        self.term = self.base = 0
        self._n_joins = 0
        self._life: int | None = None  # of the head, as it said last
        self.stamped: dict[Key, list[list[int]]] = {}  # what it truly stamped, for the witness
        self._running: dict[Key, Sample] = {}
        self._waiting: deque[Sample] = deque()
        self._known: set[Key] = set()
        self._kept: dict[Key, m.Trajectory] = {}
        self._n_sent: dict[Key, int] = {}
        self._rewards: list[str] = []
        self._push: m.PushBegin | None = None  # taking part in it
        self._n_pushes = 0  # the next push's number is at least this
        self._arrived: m.PushBegin | None = None  # weights are here and wait for the running samples to end

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.Prompt):
            self._begin(message)
        elif isinstance(message, m.Ack):
            key = (message.evaluation, message.uid, message.attempt, message.sample)
            self._kept.pop(key, None)
        elif isinstance(message, m.Cancel):
            self._cancel(message)
        elif isinstance(message, m.PushBegin):
            self._follow_term(message.term, message.base)
            self._begin_push(message)
        elif isinstance(message, m.Term):
            self._follow_term(message.term, message.version)
        elif isinstance(message, m.Rejoin):
            self._rejoin()
        elif isinstance(message, m.HeadBeat):
            self._follow_life(message.life)
        elif isinstance(message, m.Directory):
            self._follow(message)
            self._follow_life(message.life)
        elif isinstance(message, m.Stop):
            self.world.crash(self.name)

    # samples

    def _begin(self, prompt: m.Prompt) -> None:
        if self.rng.random() < self.scenario.p_unsampled:
            self._tell(m.Unsampled(prompt.uid, prompt.attempt, prompt.evaluation, m.Refund.SAMPLING_ERROR, "no"))
            return
        for number in prompt.samples:
            key = (prompt.evaluation, prompt.uid, prompt.attempt, number)
            if key not in self._known:
                self._known.add(key)
                self._waiting.append(Sample(key, self.scenario.lengths.draw(self.rng)))
        self._fill()

    def _fill(self) -> None:
        """Start what has a free slot; without interruption weights that wait go first."""
        while self._can_start:
            sample = self._waiting.popleft()
            sample.began = self.world.now - sample.made * self.scenario.token_s
            sample.n_starts += 1
            self._running[sample.key] = sample
            left_s = (sample.n_tokens - sample.made) * self.scenario.token_s
            self.world.timer(self.name, left_s, self._finish, sample, sample.n_starts)

    @property
    def _can_start(self) -> bool:
        has_room = len(self._running) < self.scenario.capacity
        return bool(self._waiting) and has_room and self._arrived is None and self.version is not None

    def _stamp(self, sample: Sample, n_tokens: int) -> None:
        """Tokens up to n_tokens were made by the version held."""
        if self.version is not None and n_tokens > sample.made:
            if sample.spans and sample.spans[-1][0] == self.version:
                sample.spans[-1][1] += n_tokens - sample.made
            else:
                sample.spans.append([self.version, n_tokens - sample.made])
            sample.made = n_tokens

    def _finish(self, sample: Sample, n_starts: int) -> None:
        if self._running.get(sample.key) is not sample or sample.n_starts != n_starts:
            return  # cancelled, or it stood still meanwhile
        self._stamp(sample, sample.n_tokens)
        del self._running[sample.key]
        evaluation, uid, attempt, number = sample.key
        self.stamped[sample.key] = sample.spans
        self._kept[sample.key] = m.Trajectory(
            uid, number, attempt, evaluation, self.name, "stop", [[1, sample.n_tokens]], sample.spans,
            self.world.now - sample.began, self.term, NO_BYTES, bytes(4 * sample.n_tokens), "", "", "",
        )  # fmt: skip
        self._tell(m.Sampled(uid, number, attempt, evaluation, sample.n_tokens))
        self._deliver(sample.key)
        if not self._running and self._arrived is not None:
            self._swap(self._arrived)
        self._fill()

    def _cancel(self, message: m.Cancel) -> None:
        self._drop(("", message.uid, message.attempt))
        if not self._running and self._arrived is not None:
            self._swap(self._arrived)
        self._fill()

    # terms

    def _follow_term(self, term: int, base: int) -> None:
        """What has tokens of versions after `base` ends; weights of such a version make no more."""
        if term <= self.term:
            return
        self._stamp_running()
        self.term, self.base, self._push, self._arrived = term, base, None, None
        made = [(key, sample.spans) for key, sample in self._running.items()]
        kept = [(key, trajectory.spans) for key, trajectory in self._kept.items()]
        void = sorted({key[:3] for key, spans in made + kept if any(version > base for version, _ in spans)})
        for group in void:
            self._drop(group)
            self._tell(m.Unsampled(group[1], group[2], group[0], m.Refund.LOST_TIMELINE, f"term {term}"))
        if self.version is not None and self.version > base:
            self.version = None
            for sample in self._running.values():  # each goes on where it is once weights are here
                self._waiting.append(sample)
            self._running.clear()

    def _follow_life(self, life: int) -> None:
        is_other, self._life = self._life not in (None, life), life
        if is_other:
            self._rejoin()

    def _rejoin(self) -> None:
        """A head that does not know us: nothing of what we hold counts there."""
        for group in {key[:3] for key in (*self._running, *self._kept, *(s.key for s in self._waiting))}:
            self._drop(group)
        self._push = self._arrived = None
        self._n_joins += 1
        index, incarnation = (int(number) for number in self.name.partition("-")[2].split("."))
        self._tell(m.Join(self.name, m.Role.GENERATOR, index, incarnation, "", 1, "", self._n_joins))
        self._tell(m.Ready(self.scenario.capacity))

    def _drop(self, group: tuple[str, int, int]) -> None:
        for held in (self._running, self._kept):
            for key in [key for key in held if key[:3] == group]:
                del held[key]
        self._waiting = deque(sample for sample in self._waiting if sample.key[:3] != group)

    # delivery

    def _follow(self, directory: m.Directory) -> None:
        before, self._rewards = self._rewards, [name for name in directory.names if name.startswith("reward-")]
        if set(self._rewards) - set(before):
            for key in self._kept:
                self._deliver(key, again=False)

    def _deliver(self, key: Key, again: bool = True) -> None:
        """To a reward now and, until the head acknowledges it, to the next one later."""
        trajectory = self._kept.get(key)
        if trajectory is None:
            return
        if self._rewards:
            n_sent = self._n_sent.get(key, 0)
            self._n_sent[key] = n_sent + 1
            reward = self._rewards[(trajectory.uid + n_sent) % len(self._rewards)]
            self.world.send(self.name, reward, trajectory)
        if again:
            self.world.timer(self.name, self.scenario.resend_s, self._deliver, key)

    def _tell(self, message: m.Message) -> None:
        self.world.send(self.name, HEAD, message)

    # weights

    def _stamp_running(self) -> None:
        for sample in self._running.values():
            made = int((self.world.now - sample.began) / self.scenario.token_s)
            self._stamp(sample, min(made, sample.n_tokens - 1))

    def _begin_push(self, begin: m.PushBegin) -> None:
        """A later push takes an earlier one's place; one announced again is none."""
        if begin.push >= self._n_pushes:
            self._n_pushes = begin.push + 1
            self._push, self._arrived = begin, None
            delay = self.scenario.push_s * (0.5 + self.rng.random())
            self.world.timer(self.name, delay, self._end_push, begin)
            self._fill()

    def _end_push(self, begin: m.PushBegin) -> None:
        """The weights are here, or something went wrong."""
        if self._push is not begin:
            return  # a later push took its place
        fault = self._fault()
        if fault == "slow":
            self.world.timer(self.name, 2 * self.scenario.push_timeout_s, self._swap_if_wanted, begin)
        elif fault == "broken":
            self._tell(m.PushBroken(begin.push, begin.version, "the group broke"))
        elif fault == "wrong":
            self._tell(m.PushDone(begin.push, begin.version, "other weights", 0.0, 0.0))
        elif fault != "silent":
            self._swap_if_wanted(begin)

    def _fault(self) -> str:
        rough = self.world.now < self.scenario.calm_s and self.rng.random() < self.scenario.p_push_fault
        return self.rng.choice(("slow", "broken", "wrong", "silent")) if rough else ""

    def _swap_if_wanted(self, begin: m.PushBegin) -> None:
        if self._push is not begin:
            return
        if self.scenario.interrupts or not self._running:
            self._swap(begin)
        else:
            self._arrived = begin

    def _swap(self, begin: m.PushBegin) -> None:
        """Between two tokens: what was made until now is by the old version."""
        self._stamp_running()
        self.version, self._push, self._arrived = begin.version, None, None
        self.world.tell(f"{self.name} holds version {begin.version}", None)
        self._tell(m.PushDone(begin.push, begin.version, f"digest {begin.version} of {begin.store}", 0.0, 0.0))
        self._fill()
