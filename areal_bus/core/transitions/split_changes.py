"""Changes the split of ranks between learners and generators, between two updates (docs/adapt.md).

`Adaptation` feeds the planner with what the head records, and asks it after an update. `SplitChanges` brings the
change about:

1. A change is wanted. Generators that have no place in the new split get no more prompts; training goes on.
2. When they hold no work and all learner ranks wait for a batch, there is none: the learners write a checkpoint.
3. When they have, the new split is written to disk. Then those whose role or group changes are told to restart.
4. The learners of the new split begin a term at the version of that checkpoint, as after the death of a learner.

Before step 3 a restarted head goes on with the old split, after it with the new one. A learner that dies in step 2
brings the change back to step 1.
"""

from collections.abc import Callable, Mapping
from typing import Any

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.split import RankPool, Split, scheduled
from areal_bus.core.planner.ring_observer import RingObserver
from areal_bus.core.planner.split_planner import SplitPlanner
from areal_bus.core.state import HeadState, Phase, SplitChange
from areal_bus.core.transitions.member_lifecycle import MemberLifecycle
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role

Fields = Mapping[str, Any]  # of a journal line


class Adaptation:
    """The head sets `now` before it handles an event. A restarted head starts measuring from zero."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        """Raises ValueError for a head whose rules have no planner."""
        rules = state.rules
        if rules.planner is None:
            raise ValueError("an adaptation needs the rules of a planner")
        self.state, self.effects, self.now = state, effects, 0.0
        self.observer = RingObserver(batch_size=rules.batch_size, n_samples=rules.n_samples, slots=rules.planner.slots)
        self.planner = SplitPlanner(rules.planner, last_change=state.split.since)
        self._n_tokens = 0  # of the batch that is in training
        self._updated_s: float | None = None  # when the last update was finished
        self._changing_since: float | None = None  # the last update before a change of the split that is not over
        self._handlers: dict[Event, Callable[[Fields], None]] = {
            Event.LEASE: self._on_lease,
            Event.SAMPLED: self._on_sampled,
            Event.READY: lambda line: self.observer.ready(line["uid"], self.now),
            Event.REFUND: lambda line: self.observer.released(line["uid"], self.now),
            Event.BATCH: self._on_batch,
            Event.TRAJECTORY: self._on_trajectory,
            Event.UPDATE: self._on_update,
            Event.PUBLISH: lambda line: self.observer.published(line["version"], self.now),
            Event.TERM: lambda line: self.observer.interrupted(line["open"], self.now),
            Event.SPLIT: self._on_split,
        }
        effects.on_record = self._see

    def wanted_learners(self, version: int) -> int | None:
        """Learner ranks that the planner wants after this update; None: those that there are."""
        decision = self.planner.decide(version, self.observer.figures, self.state.split.learners)
        if decision.learners is not None:
            predicted = {str(n): round(speed, 6) for n, speed in decision.predicted.items()}
            self.effects.record(Event.ADAPT, version=version, wanted_learners=decision.learners, predicted=predicted)
        return decision.learners

    # events

    def _see(self, event: Event, line: Fields) -> None:
        handler = self._handlers.get(event)
        if handler is not None:
            handler(line)

    def _on_lease(self, line: Fields) -> None:
        self.observer.leased(line["uid"], line["holder"], line["n"], self.now)

    def _on_sampled(self, line: Fields) -> None:
        if not line.get("evaluation"):
            self.observer.sampled(line["uid"], line["n_tokens"], self.now)

    def _on_batch(self, line: Fields) -> None:
        self._n_tokens = 0
        self.observer.taken(self.state.split.learners, self.now)
        if self._changing_since is not None:
            self.planner.changed(line["step"], self.now - self._changing_since)
            self._changing_since = None

    def _on_trajectory(self, line: Fields) -> None:
        self._n_tokens += line["n_tokens"]

    def _on_update(self, line: Fields) -> None:
        version, split = line["version"], self.state.split
        self._updated_s = self.now
        self.observer.n_samples = self.state.rules.mean_samples_at(version)
        self.observer.updated(version, self._n_tokens, self.now)
        self.planner.measured(version, self.observer.figures, split.learners, self.observer.interval_s)

    def _on_split(self, line: Fields) -> None:
        if line["why"] == "change":
            self._changing_since = self._updated_s if self._updated_s is not None else self.now


class SplitChanges:
    """Takes a change from the wish to the new split. Owns `state.split` and `state.change`."""

    def __init__(
        self,
        state: HeadState,
        effects: Effects,
        rollouts: Rollouts,
        lifecycle: MemberLifecycle,
        adaptation: Adaptation | None = None,
    ) -> None:
        self.state, self.effects, self.adaptation = state, effects, adaptation
        self.pool, self.terms, self.gate = state.rules.pool, state.terms, state.gate
        self.rollouts = rollouts
        self.lifecycle = lifecycle
        self._consulted: int | None = None  # version for which the schedule was looked up
        if self.pool is not None:
            self._record(state.split, why="start")

    def begin(self, learners: int) -> None:
        """Want a split with this number of learner ranks. Raises ImpossibleEvent if it cannot be had now."""
        state, pool = self.state, self.pool
        if pool is None:
            raise ImpossibleEvent("the split of this job is fixed: [topology.adapt] is not set")
        if state.change.target is not None or state.change.handed_over is not None:
            raise ImpossibleEvent("one change of the split at a time")
        if state.phase is not Phase.TRAINING or state.is_draining:
            raise ImpossibleEvent("change of the split refused: the run is not training, or it drains")
        if why := pool.refusal(learners):
            raise ImpossibleEvent(why)
        if learners != state.split.learners:
            state.change.target, state.change.wanted_at = learners, self.gate.u
            wanted = Split(learners, pool.generators_at(learners))
            text = f"the split changes after an update: {state.split} become {wanted}"
            self.effects.progress("note", name="head", text=text)

    def advance(self) -> None:
        """After each event: ask schedule or planner, let generators leave, commit a change that is written."""
        change = self.state.change
        if self.pool is None:
            return
        if self.state.phase in (Phase.CLOSING, Phase.AFTER) and change.target is not None:
            self._withdraw(self.pool)  # its generators may evaluate
        if self.state.phase is not Phase.TRAINING:
            return
        self._consult()
        if change.target is None:
            return
        if change.is_handing_over and self.terms.begun_by is None:
            change.is_handing_over = False  # a learner died: once more when the next ones ask for a batch
        if self.state.is_draining:
            if not change.is_handing_over:
                self._withdraw(self.pool)
            return
        leaving = self._leaving(self.pool, change.target)
        for member in leaving:
            if not member.leaving:
                member.leaving = True
                why = "its rank will learn"
                self.effects.record(Event.MEMBER, name=member.name, state=str(member.standing), why=why)
        change.is_next = self.gate.u >= change.wanted_at and not any(map(self._is_at_work, leaving))
        if self._has_handed_over():
            self._commit(self.pool, change.target)

    @property
    def is_due(self) -> bool:
        """Whether the learners, which all wait for a batch, are to write the checkpoint now."""
        return self.state.change.is_next and self.state.evaluations.open is None

    def hand_over(self, learners: list[Member]) -> None:
        """The learners get no batch: they write a checkpoint of their version and wait. The head writes one, too."""
        self.state.change.is_handing_over = True
        checkpoint = self.terms.checkpoints[self.gate.u] = self.state.checkpoint(self.gate.u)
        self.effects.save(checkpoint)
        for learner in learners:  # all ranks receive the same answer
            self.effects.send(learner.name, m.NoBatch(self.gate.w, drained=True))
        self.terms.requests.clear()

    def _consult(self) -> None:
        """Ask schedule or planner once at each version, but not at the one at which the split changed last."""
        state, version = self.state, self.gate.u
        is_ready = self.terms.begun_by is not None and not state.is_draining and state.change.target is None
        if not is_ready or version == self._consulted or version <= state.split.since:
            return
        self._consulted = version
        wanted = scheduled(state.rules.schedule, version)
        if wanted is None and self.adaptation is not None:
            wanted = self.adaptation.wanted_learners(version)
        if wanted is not None and wanted != state.split.learners and version < state.rules.total_steps:
            self.begin(wanted)

    def _leaving(self, pool: RankPool, target: int) -> list[Member]:
        """Generators whose ranks learn in the wanted split."""
        wanted = Split(target, pool.generators_at(target))
        return [x for x in self.state.members.of(Role.GENERATOR) if not pool.has_place(x.role, x.index, wanted)]

    def _is_at_work(self, member: Member) -> bool:
        is_alive = member.standing is not MemberState.DEAD
        return is_alive and (bool(member.leased) or self.rollouts.holds_any(member.name))

    def _has_handed_over(self) -> bool:
        """All learner ranks have written their part, and no push is in flight that the change would break."""
        state = self.state
        has_written = len(self.terms.finished) == state.split.learners
        return state.change.is_handing_over and has_written and state.pushes.current is None

    def _withdraw(self, pool: RankPool) -> None:
        """The run drains or ends with the split that it has."""
        change = self.state.change
        for member in [] if change.target is None else self._leaving(pool, change.target):
            member.leaving = False
        self.state.change = SplitChange()

    def _commit(self, pool: RankPool, target: int) -> None:
        """The new split holds from here. Whoever must restart for it is told so, and is a member no more."""
        state, version = self.state, self.gate.u
        gone = [*state.members.of(Role.LEARNER), *self._leaving(pool, target)]
        state.split = Split(target, pool.generators_at(target), state.split.number + 1, version)
        checkpoint = state.checkpoint(version)
        self.terms.checkpoints[version] = checkpoint
        self.terms.checkpointed(version)
        self.effects.divide(state.split, checkpoint)
        self.terms.saved(checkpoint)
        self._record(state.split, why="change")
        self.effects.progress("note", name="head", text=f"from version {version} on: {state.split}")
        state.change = SplitChange(handed_over=version)
        self.terms.break_crew()
        why = f"split {state.split.number} has {state.split}"
        for member in gone:
            self.lifecycle.part_with(member.name, m.Reassign(why), why)
        self.lifecycle.send_directory()

    def _record(self, split: Split, *, why: str) -> None:
        self.effects.record(
            Event.SPLIT,
            split=split.number,
            learners=split.learners,
            generators=split.generators,
            most_generators=0 if self.pool is None else self.pool.generators,
            version=split.since,
            why=why,
        )
