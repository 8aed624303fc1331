"""A generator without a model: samples take time, and each token has the version that the generator held then.

Like the real one, it keeps a trajectory until the head acknowledges it, resends it to another reward, cancels groups
and follows terms.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_bus import messages as m
from areal_bus.core.parts.partial_rollouts import SampleOffers
from areal_bus.core.parts.terms import TermHistory
from areal_lab.staleness.simulator.sample import Key, SimulatedReport, SimulatedSample, report, report_number
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import HEAD, World

Group = tuple[str, int, int]  # evaluation, uid, attempt
Weights = Mapping[tuple[str, int], str]  # (whose, version) -> which weights those are: no two updates make the same
NO_BYTES = b""
NO_REASON = "it cannot"
ROLES = "abc"


@dataclass(frozen=True, slots=True)
class SharedRecords:
    """What all generators of a ring have in common."""

    weights: Weights
    reports: list[SimulatedReport]  # of all generators: the first "id" of a Partial is the number of its report


def episode(uid: int, number: int, n_tokens: int) -> tuple[list[list[int]], list[int], str]:
    """Segments of a sample, the trajectories that they extend, and their roles: one turn, or a random tree of turns."""
    rng = random.Random(f"episode {uid} {number}")
    n_turns, roles = min(n_tokens, rng.choice((1, 1, 2, 3, 6))), rng.choice(("", ROLES))
    ends = [*sorted(rng.sample(range(1, n_tokens), n_turns - 1)), n_tokens]
    segments, trajectories = list[list[int]](), list[int]()
    for begin, end in zip([0, *ends], ends, strict=False):
        n_begun = max(trajectories, default=-1) + 1
        trajectories.append(rng.randint(0, n_begun))
        segments.append([1 if trajectories[-1] == n_begun else rng.randint(0, 2), end - begin])
    names = " ".join(rng.choice(roles) for _ in range(max(trajectories) + 1)) if roles else ""
    return segments, trajectories if any(trajectories) else [], names


class SimulatedGenerator:
    """One incarnation."""

    def __init__(
        self,
        world: World,
        scenario: Scenario,
        name: str,
        rng: random.Random,
        shared: SharedRecords,
        ended: Callable[[str], None],
    ) -> None:
        """`ended(name)` is called when it ends without a fault: it left, was evicted, or a prompt killed it."""
        self.world, self.scenario, self.name, self.rng = world, scenario, name, rng
        self._all_weights, self._reports, self._ended = shared.weights, shared.reports, ended
        self._begun: dict[Key, SimulatedReport] = {}  # of other generators, for samples whose prompt follows
        self.n_continued = self.n_offered = 0
        self.version: int | None = None
        self.weights = ""  # their identity
        self.timeline = TermHistory()
        self.n_joins = 0  # after the first one
        self._life: int | None = None  # of the head, by its last message
        self._offers = SampleOffers()
        self._is_leaving = False
        self.finished: dict[Key, SimulatedSample] = {}  # the true stamps, for the witness
        self._running: dict[Key, SimulatedSample] = {}
        self._waiting: deque[SimulatedSample] = deque()
        self._known: set[Key] = set()
        self._kept: dict[Key, m.Trajectory] = {}
        self._leases: dict[tuple[str, int, int], str] = {}  # ids by evaluation, uid and attempt
        self._n_sent: dict[Key, int] = {}
        self._rewards: list[str] = []
        self._push: m.PushBegin | None = None  # in progress
        self._n_pushes = 0  # the next push's number is at least this
        self._arrived: m.PushBegin | None = None  # weights are here and wait for the running samples to end
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Prompt: self._begin,
            m.Partial: self._go_on_from,
            m.Ack: self._forget,
            m.Cancel: self._cancel,
            m.PushBegin: self._follow_push,
            m.Term: self._hear_of_term,
            m.Rejoin: lambda _: self._rejoin(),
            m.HeadHeartbeat: lambda message: self._follow_life(message.life),
            m.PeerList: self._follow,
            m.Stop: lambda _: self._stop(),
            m.Evict: lambda message: self._die(for_good=message.for_good),
            m.Reassign: lambda _: self._die(),
        }

    def receive(self, sender: str, message: m.Message) -> None:
        self._handlers[type(message)](message)

    def leave(self) -> None:
        """Begin to drain."""
        self._is_leaving = True
        self._tell(m.LeaveRequest())

    def _stop(self) -> None:
        self.world.crash(self.name)
        if self._is_leaving:
            self._ended(self.name)

    # samples

    def _begin(self, prompt: m.Prompt) -> None:
        if self.rng.random() < self.scenario.p_unsampled or self.scenario.fails(self.name, self.world.now):
            self._tell(
                m.SampleFailed(prompt.uid, prompt.attempt, prompt.evaluation, m.Refund.SAMPLING_ERROR, NO_REASON)
            )
            return
        self._leases[prompt.evaluation, prompt.uid, prompt.attempt] = prompt.lease
        for number in prompt.samples:
            key = (prompt.evaluation, prompt.uid, prompt.attempt, number)
            if key not in self._known:
                self._known.add(key)
                self._waiting.append(self._new(key, self.scenario.lengths.draw(self.rng)))
        if self.scenario.poison and not prompt.evaluation and int(prompt.row) in self.scenario.poison:
            group = ("", prompt.uid, prompt.attempt)
            self.world.timer(self.name, self.rng.uniform(0, 5) * self.scenario.token_s, self._die_of, group)
        self._fill()

    def _new(self, key: Key, n_tokens: int) -> SimulatedSample:
        begun = self._begun.pop(key, None)
        if begun is None or self.version is None or begun.spans[-1][0] > self.version:
            return SimulatedSample(key, n_tokens)
        if self.scenario.finishes and begun.spans[0][0] != self.version:
            return SimulatedSample(key, n_tokens)
        self.n_continued += 1
        made = sum(n for _, n in begun.spans)
        spans = [list(span) for span in begun.spans]
        return SimulatedSample(
            key, begun.n_tokens, made=made, spans=spans, made_by=list(begun.made_by), n_reported=made, n_done=made
        )

    def _go_on_from(self, partial: m.Partial) -> None:
        self._begun["", partial.uid, partial.attempt, partial.sample] = self._reports[report_number(partial)]

    def _report(self) -> None:
        """Report unfinished samples, which the head gives to others if this generator dies."""
        at_least = self.scenario.report_tokens
        for sample in [*self._running.values(), *self._waiting]:
            if sample.key[0] or not 0 < at_least <= sample.made - sample.n_reported or not self.scenario.eta:
                continue
            sample.n_reported = sample.made
            self._tell(self._partial(sample))

    def _partial(self, sample: SimulatedSample, *, less: int = 0) -> m.Partial:
        made = report(sample, less=less)
        number, n_made = len(self._reports), sum(n for _, n in made.spans)
        self._reports.append(made)
        _, uid, attempt, index = sample.key
        ids = number.to_bytes(4, "little") + bytes(4 * n_made)
        term = self.timeline.term
        lease = self._leases.get(("", uid, attempt), "")
        return m.Partial(uid, index, attempt, term, [[1, n_made]], made.spans, ids, bytes(4 * n_made), lease)

    def _keep_offers(self) -> None:
        """Keep offers for the next head: finished samples without their last token, and unfinished ones."""
        if self.scenario.report_tokens and self.scenario.eta:
            self._stamp_running()
            ended = [self.finished[key] for key in self._kept]
            held = [self._partial(x, less=1) for x in ended if not x.key[0] and x.made > 1]
            begun = [*self._running.values(), *self._waiting]
            self._offers.keep([*held, *(self._partial(x) for x in begun if not x.key[0] and x.made)], self.timeline)

    def _offer(self, term: int, base: int) -> None:
        for partial in self._offers.take(term, base):
            self.n_offered += 1
            self._tell(partial)

    def _die_of(self, group: Group) -> None:
        if any(key[:3] == group for key in self._running):
            self._die()

    def _die(self, *, for_good: bool = False) -> None:
        self.world.crash(self.name)
        if not for_good:
            self._ended(self.name)

    def _fill(self) -> None:
        """Start samples in free slots; without interruption, waiting weights go first."""
        while self._waiting and self._can_start:
            sample = self._waiting.popleft()
            sample.began = self.world.now - sample.made * self.scenario.token_s
            sample.n_starts += 1
            self._running[sample.key] = sample
            left_s = (sample.n_tokens - sample.made) * self.scenario.token_s
            self.world.timer(self.name, left_s, self._finish, sample, sample.n_starts)

    @property
    def _can_start(self) -> bool:
        return len(self._running) < self.scenario.capacity and self.version is not None and self._may_start

    @property
    def _may_start(self) -> bool:
        return self._arrived is None or self.scenario.finishes

    @property
    def _has_room(self) -> bool:
        """Whether weights that are here may be swapped in."""
        if not self.scenario.finishes:
            return self.scenario.interrupts or not self._running
        begun = {sample.spans[0][0] if sample.spans else self.version for sample in self._running.values()}
        return self.version not in begun or len(begun) <= self.scenario.eta

    def _stamp(self, sample: SimulatedSample, n_tokens: int) -> None:
        """Stamp tokens up to n_tokens with the version held, or the one that the sample began with."""
        if self.version is None or n_tokens <= sample.made:
            return
        held = self.version, self.weights
        version, weights = sample.made_by[-1] if self.scenario.finishes and sample.made_by else held
        if sample.spans and sample.spans[-1][0] == version:
            sample.spans[-1][1] += n_tokens - sample.made
        else:
            sample.spans.append([version, n_tokens - sample.made])
        sample.made_by.append((version, weights))
        sample.made = n_tokens

    def _finish(self, sample: SimulatedSample, n_starts: int) -> None:
        if self._running.get(sample.key) is not sample or sample.n_starts != n_starts:
            return  # cancelled, or stopped meanwhile
        self._stamp(sample, sample.n_tokens)
        del self._running[sample.key]
        evaluation, uid, attempt, number = sample.key
        self.finished[sample.key] = sample
        segments, trajectories, roles = episode(uid, number, sample.n_tokens)
        self._kept[sample.key] = m.Trajectory(
            uid, number, attempt, evaluation, self.name, "stop", segments, sample.spans,
            self.world.now - sample.began, self.timeline.term, NO_BYTES, bytes(4 * sample.n_tokens), "", "", "",
            lease=self._leases.get(sample.key[:3], ""), trajectories=trajectories, roles=roles,
        )  # fmt: skip
        self._tell(m.Sampled(uid, number, attempt, evaluation, sample.n_tokens))
        self._deliver(sample.key)
        self._swap_when_quiet()
        self._fill()

    def _forget(self, ack: m.Ack) -> None:
        self._kept.pop((ack.evaluation, ack.uid, ack.attempt, ack.sample), None)

    def _cancel(self, message: m.Cancel) -> None:
        self._drop((message.evaluation, message.uid, message.attempt))
        self._swap_when_quiet()
        self._fill()

    # terms

    def _hear_of_term(self, message: m.Term) -> None:
        self._follow_term(message.term, message.version)
        self._offer(message.term, message.version)

    def _follow_term(self, term: int, base: int) -> None:
        """Samples with tokens of lost versions end; weights of such a version sample no more."""
        if not self.timeline.begin(term, base):
            return
        self._stamp_running()
        self._begun.clear()
        self._push = self._arrived = None
        made = [(key, sample.spans) for key, sample in self._running.items()]
        made += [(sample.key, sample.spans) for sample in self._waiting]
        kept = [(key, trajectory.spans) for key, trajectory in self._kept.items()]
        for group in sorted({key[:3] for key, spans in made + kept if not self._keeps(spans)}):
            self._drop(group)
            self._tell(m.SampleFailed(group[1], group[2], group[0], m.Refund.LOST_TIMELINE, f"term {term}"))
        if not self.timeline.keeps(self.version):
            self._put_weights_away()

    def _keeps(self, spans: list[list[int]]) -> bool:
        return self.timeline.keeps(max((version for version, _ in spans), default=None))

    def _put_weights_away(self) -> None:
        """Drop the weights. Samples continue when new ones arrive."""
        self.version = None
        self._waiting.extendleft(reversed(self._running.values()))
        self._running.clear()

    def _follow_life(self, life: int) -> None:
        is_other, self._life = self._life not in (None, life), life
        if is_other:
            self._rejoin()

    def _rejoin(self) -> None:
        """Join a head that does not know this generator: it has no lease there."""
        self._keep_offers()
        for held in (self._running, self._kept, self._waiting, self._begun):
            held.clear()
        self._push = self._arrived = None
        self.timeline = TermHistory()
        self._put_weights_away()
        self.n_joins += 1
        index, incarnation = (int(number) for number in self.name.partition("-")[2].split("."))
        self._tell(m.Join(self.name, m.Role.GENERATOR, index, incarnation, "", 1, "", self.n_joins))
        self._tell(m.Ready(self.scenario.capacity))
        if self._is_leaving:
            self._tell(m.LeaveRequest())

    def _drop(self, group: Group) -> None:
        for held in (self._running, self._kept):
            for key in [key for key in held if key[:3] == group]:
                del held[key]
        self._waiting = deque(sample for sample in self._waiting if sample.key[:3] != group)

    # delivery

    def _follow(self, directory: m.PeerList) -> None:
        before, self._rewards = self._rewards, [name for name in directory.names if name.startswith("reward-")]
        if set(self._rewards) - set(before):
            for key in self._kept:
                self._deliver(key, again=False)
        self._follow_life(directory.life)

    def _deliver(self, key: Key, again: bool = True) -> None:
        """Send to a reward, and to the next one later until the head acknowledges it."""
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

    def _follow_push(self, begin: m.PushBegin) -> None:
        """A later push replaces an earlier one. A repeated announcement, or one of an older term, is ignored."""
        self._follow_term(begin.term, begin.base)
        self._offer(begin.term, begin.base)
        if begin.push >= self._n_pushes and begin.term == self.timeline.term:
            self._n_pushes = begin.push + 1
            self._push, self._arrived = begin, None
            delay = self.scenario.push_s * (0.5 + self.rng.random())
            if self.scenario.slow and self.name.startswith("generator-0."):
                delay = min(self.scenario.slow * delay, self.scenario.slowest_s)
            self.world.timer(self.name, delay, self._end_push, begin)
            self._fill()

    def _end_push(self, begin: m.PushBegin) -> None:
        """The weights have arrived, or the push failed."""
        if self._push is not begin:
            return  # a later push replaced it
        fault = self._fault()
        if self.scenario.is_refused(begin.members, self.world.now):
            fault = {"said": "broken", "silent": "silent"}[self.scenario.refuses]
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
        if self._push is begin:
            self._arrived = begin
            self._swap_when_quiet()

    def _swap_when_quiet(self) -> None:
        if self._arrived is not None and self._has_room:
            self._swap(self._arrived)

    def _swap(self, begin: m.PushBegin) -> None:
        """Swap between two tokens: earlier tokens belong to the old version."""
        self._stamp_running()
        self.version, self._push, self._arrived = begin.version, None, None
        self.weights = self._all_weights.get((begin.store, begin.version), "")
        self.world.tell(f"{self.name} holds version {begin.version}", None)
        self._tell(m.PushDone(begin.push, begin.version, self.weights, 0.0, 0.0))
        self._report()
        self._fill()
