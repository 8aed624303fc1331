"""The head as a state machine: messages and ticks go in, ordered effects come out.

Dispatches each event to its module, then does everything that the rules now allow.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from areal_bus import messages as m
from areal_bus.authorization import check_sender
from areal_bus.core.effects import Effect, Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.state import HeadState, Phase
from areal_bus.core.transitions.group_rewards import GroupRewards
from areal_bus.core.transitions.guest_leases import GuestLeases
from areal_bus.core.transitions.member_lifecycle import MemberLifecycle
from areal_bus.core.transitions.phases import Phases
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.core.transitions.scheduler import Scheduler
from areal_bus.core.transitions.split_changes import Adaptation, SplitChanges
from areal_bus.core.transitions.training import Training
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import Role

MAX_COUNTED = 4096  # (sender, message type) pairs whose rejections are counted
LATE = 2  # an event more than silent_s / LATE after the last one is late: the head was not scheduled, or was busy
COUNTS = 8  # the part of a late gap that counts as silence: silent_s / COUNTS
ALL_RECORDED = 100  # rejections of a (sender, message type) that are recorded one by one

Handler = Callable[[Member, Any], None]


class Head:
    """`on` takes a message, `tick` the time. Both return the effects to carry out, in order."""

    def __init__(self, state: HeadState, *, now: float) -> None:
        """A restarted head begins a new term, at the version of the learner's BeginTerm."""
        self.state = state
        self._effects = Effects()
        self.rollouts = Rollouts(state, self._effects)
        self.group_rewards = GroupRewards(state, self._effects, self.rollouts)
        self.guest_leases = GuestLeases(state, self.rollouts)
        self.scheduler = Scheduler(state, self._effects)
        self.publisher = Publisher(state, self._effects)
        self.lifecycle = MemberLifecycle(state, self._effects, self.rollouts, self.publisher)
        self.phases = Phases(state, self._effects, self.rollouts)
        self.adaptation = Adaptation(state, self._effects) if state.rules.planner is not None else None
        self.split_changes = SplitChanges(state, self._effects, self.rollouts, self.lifecycle, self.adaptation)
        self.training = Training(state, self._effects, self.rollouts, self.publisher, self.phases, self.split_changes)
        self._assembling_since = self._last_event = now
        self._n_rejected: Counter[tuple[str, str]] = Counter()  # by sender and message type
        self._n_late: Counter[tuple[str, str]] = Counter()  # of those
        self._handlers: dict[type, Handler] = {
            m.Ready: self._on_ready,
            m.Heartbeat: self._on_heartbeat,
            m.Sampled: self.rollouts.sampled,
            m.Partial: self.rollouts.partial,
            m.SampleFailed: self.rollouts.unsampled,
            m.Scored: lambda _, message: self.rollouts.scored(message),
            m.GroupScored: self.group_rewards.scored,
            m.LeaveRequest: lambda member, _: self.lifecycle.leave(member),
            m.BeginTerm: self.training.begin_term,
            m.Checkpointed: self.training.checkpointed,
            m.BatchRequest: self.training.request,
            m.UpdateDone: self.training.update_done,
            m.Finished: self.training.finished,
            m.Failure: self._on_failure,
            m.PushDone: self.publisher.done,
            m.PushBroken: self.publisher.broken,
        }

    # events

    def on(self, sender: str, message: m.Message, now: float) -> list[Effect]:
        """Handle one message. A message that breaks a rule is rejected and journalled."""
        self._check_gap(now)
        try:
            if isinstance(message, m.Join):
                self._on_join(sender, message, now)
            elif isinstance(message, m.Disconnected):
                self.lifecycle.cut(sender)
            elif sender not in self.state.members.by_name:
                self.lifecycle.answer_stranger(sender, now)
            else:
                member, is_news = self.lifecycle.heard(sender, message, now)
                if isinstance(message, m.Heartbeat) and not is_news:
                    self._on_heartbeat(member, message)
                    return self._effects.take()  # it changes nothing else
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise ImpossibleEvent(f"the head does not accept {type(message).__name__}")
                check_sender(member.role, message)
                handler(member, message)
        except ImpossibleEvent as error:
            self._reject(sender, message, error)
        return self._settle(now)

    def tick(self, now: float, *, until: float | None = None) -> list[Effect]:
        """Check silences and deadlines. All messages that arrived before `until` are handled (None: before now)."""
        self._check_gap(now)
        self.lifecycle.miss(now if until is None else until, now)
        self.guest_leases.expire()
        self.publisher.expire(now)
        if self._awaits_an_update():
            self._assembling_since = now
        if self.state.phase is Phase.ASSEMBLING and now - self._assembling_since > self.state.rules.assemble_s:
            self.phases.end_unassembled(self.publisher.errors())
        return self._settle(now)

    def drain(self, now: float) -> list[Effect]:
        """End soon, so that a later start continues from here: finish and checkpoint the current update first."""
        self.phases.drain()
        return self._settle(now)

    def requeue(self, name: str, now: float) -> list[Effect]:
        """Lease the work of this member to others. It counts as dead until it is heard, and is then STALE (I7)."""
        member = self.state.members.by_name.get(name)
        if member is not None and member.can_be_lost:
            self.state.members.mark_dead(member)
            self.lifecycle.lose(member, "it stands still", died=False)
        return self._settle(now)

    def _check_gap(self, now: float) -> None:
        """Time in which the head stood still counts little as silence; but a head always late still detects deaths."""
        gap_s, self._last_event = now - self._last_event, now
        self.state.now = now
        if self.adaptation is not None:
            self.adaptation.now = now
        silent_s = self.state.rules.silent_s
        if gap_s > silent_s / LATE:
            self.state.members.slept(gap_s - silent_s / COUNTS, now)

    def _awaits_an_update(self) -> bool:
        """A learner survived a head. It reports its version when its update is done, however long that takes."""
        if self.state.phase is not Phase.ASSEMBLING:
            return False
        return any(learner.again for learner in self.state.members.of(Role.LEARNER, MemberState.JOINING))

    # messages of every member

    def _on_join(self, sender: str, message: m.Join, now: float) -> None:
        if self.state.phase is Phase.STOPPING:
            self._effects.send(sender, m.Stop("the job is over"))
            raise ImpossibleEvent("join refused: the job is over")
        check_sender(Role(message.role), message)
        self.lifecycle.join(sender, message, now)

    def _on_ready(self, member: Member, message: m.Ready) -> None:
        if member.ready:
            return
        most = self.state.rules.capacity if member.role is Role.GENERATOR else None
        self.state.members.ready(member.name, message.capacity if most is None else min(message.capacity, most))
        self._effects.record(Event.MEMBER, name=member.name, state=str(member.standing), why="ready")

    def _on_heartbeat(self, member: Member, message: m.Heartbeat) -> None:
        if member.note != message.note and self.state.phase is Phase.ASSEMBLING:
            self._effects.progress("note", name=member.name, text=message.note)
        member.progress, member.note = message.progress, message.note

    def _on_failure(self, member: Member, message: m.Failure) -> None:
        """Only recorded here, once: the supervisor of the actor ends the job and names the actor."""
        if member.has_failed:
            raise LateEvent(f"{member.name} has reported its failure")
        member.has_failed = True
        self._effects.record(Event.FAILED, name=member.name, error=message.error[:500])

    # after every event

    def _settle(self, now: float) -> list[Effect]:
        """Do everything that the rules now allow, and return the effects."""
        state = self.state
        if state.phase is not Phase.STOPPING:
            self.publisher.close(now)
            self.split_changes.advance()
            hopeless = self.lifecycle.pause_failing(now)
            if hopeless is None and state.pushes.quarantined:
                hopeless = self.lifecycle.dismiss()
            if hopeless is None:
                self.publisher.begin(now)
            else:
                self.phases.end(1, hopeless)
            self.phases.advance()
            self.training.drop_too_old()
            self.training.replace_groups()
            if state.phase is not Phase.ASSEMBLING:
                self.group_rewards.ask()
                admitting = state.phase in (Phase.BEFORE, Phase.TRAINING) and not state.is_draining
                self.scheduler.lease_all(admitting=admitting)
                for entry, why in self.scheduler.take_unsendable():
                    self.rollouts.refund(entry, m.Refund.PROMPT_TOO_LONG, why)
            self.lifecycle.let_go()
            self.training.serve_requests()
            self.phases.end_after_refunds()
        return self._effects.take()

    def _reject(self, sender: str, message: m.Message, error: ImpossibleEvent) -> None:
        """Record a rejected message: every verdict; of others the first 100 per sender and type, then powers of two."""
        what, why = type(message).__name__, str(error)
        if len(self._n_rejected) > MAX_COUNTED:
            self._n_rejected.clear()
            self._n_late.clear()
        self._n_rejected[sender, what] += 1
        self._n_late[sender, what] += isinstance(error, LateEvent)
        n = self._n_rejected[sender, what]
        n_wrong = n - self._n_late[sender, what]
        is_news = not isinstance(error, LateEvent) and n_wrong.bit_count() == 1
        if sender in self.state.members.by_name and isinstance(error, LateEvent):
            self._effects.progress("late", text=f"refused {what} of {sender}: {why}")
        elif sender in self.state.members.by_name and is_news:
            self._effects.progress("note", name="head", text=f"refused {what} of {sender} ({n_wrong} so far): {why}")
        if n <= ALL_RECORDED or n.bit_count() == 1 or is_news or isinstance(message, m.Scored):
            ids = {name: getattr(message, name) for name in ("uid", "sample", "attempt") if hasattr(message, name)}
            self._effects.record(Event.REFUSED, what=what, sender=sender, why=why, n=n, **ids)
