"""Stall monitor: records the wait-for graph, warns when nothing moves, then returns the configured abort or requeue."""

from dataclasses import dataclass

from areal_bus import messages as m
from areal_bus.config.sections import WatchdogConfig
from areal_bus.core.diagnosis import ProgressTracker, StallVerdict, Wait, verdict
from areal_bus.core.effects import Effect, Effects
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.lease_failures import actor_of
from areal_bus.core.members.membership import MemberState
from areal_bus.core.state import Phase
from areal_bus.messages import Role

CHECK_S = 1.0  # interval between two checks
LOOK_S = 5.0  # interval between two looks at the wait-for graph: one costs more than all else that is due each second
REFRESH_S = 60.0  # interval at which an unchanged graph is recorded again
MISSED_HEARTBEATS = 3  # a member is silent after this many
NO_WAIT = Wait("", "", (), 0.0)


@dataclass(slots=True)
class StallAlarm:
    """Due when a stall has lasted `after_s`, then 2, 4, ... times as long. It resets when the stall ends."""

    after_s: float
    next_s: float = 0.0

    def is_due(self, lasted_s: float) -> bool:
        if lasted_s < self.after_s:
            self.next_s = self.after_s
        if lasted_s < max(self.next_s, self.after_s):
            return False
        self.next_s = max(self.next_s, self.after_s)
        while self.next_s <= lasted_s:
            self.next_s *= 2
        return True


class StallMonitor:
    """Monitors the ring as a whole and each member that holds work and makes no progress."""

    def __init__(self, settings: WatchdogConfig, *, heartbeat_s: float) -> None:
        self.settings = settings
        self.tracker = ProgressTracker(quiet_s=MISSED_HEARTBEATS * heartbeat_s, still_s=settings.progress_s)
        self._checked_at: float | None = None  # by the head's clock
        self._looked_at: float | None = None  # for a graph to record
        self._recorded_at: float | None = None
        self._recorded: object = None  # the last graph in the journal
        self._warn_alarm, self._act_alarm = StallAlarm(settings.stall_s), StallAlarm(settings.act_s)
        self._is_stalled = False  # a warning was written
        self._member_alarms: dict[str, tuple[StallAlarm, StallAlarm]] = {}  # (warn, act) of each stuck member
        self._effects = Effects()

    def look(self, head: Head, now: float) -> list[Effect]:
        """Check the ring and return effects. Call it at every tick, after the head's own tick."""
        if head.state.phase is Phase.STOPPING or (self._checked_at is not None and now - self._checked_at < CHECK_S):
            return []
        self._checked_at = now
        self.tracker.look(head.state, now)
        self._record_waits(head, now)
        done = self._check_ring(head, now)
        return [*done, *self._effects.take()] if done else [*self._check_members(head, now), *self._effects.take()]

    # the wait-for graph

    def _record_waits(self, head: Head, now: float) -> None:
        """Every LOOK_S, record the wait-for graph when it has changed."""
        if self._looked_at is not None and now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        age_s = None if self._recorded_at is None else now - self._recorded_at
        found = verdict(head.state, self.tracker, now)
        graph = tuple((wait.who, wait.on) for wait in found.waits), found.culprits
        if graph == self._recorded and age_s is not None and age_s < REFRESH_S:
            return
        self._recorded, self._recorded_at = graph, now
        for i, wait in enumerate(found.waits or (NO_WAIT,)):
            self._effects.record(
                Event.WAIT,
                i=i,
                n=len(found.waits),
                who=wait.who,
                what=wait.for_what,
                on=" ".join(wait.on),
                since_s=round(wait.since_s, 3),
                detail=wait.detail,
                verdict=found.sentence if i == 0 else "",
            )

    # the ring

    def _check_ring(self, head: Head, now: float) -> list[Effect]:
        """Warn when nothing has moved for `stall_s`, act after `act_s`. Returns the effects of the action."""
        stalled_s = self.tracker.stalled_s
        warns, acts = self._warn_alarm.is_due(stalled_s), self._act_alarm.is_due(stalled_s)
        found = verdict(head.state, self.tracker, now) if warns or acts else None
        if found is not None and acts and (self.settings.action == "abort" or found.absent):  # no role comes back
            self._is_stalled = True
            self._abort(head, found, stalled_s)
            return []
        if found is not None and (warns or self.settings.action == "requeue"):
            self._is_stalled = True
            self._warn("ring", stalled_s, f"nothing has moved for {stalled_s:.0f} s: {found.sentence}", found.culprits)
            requeues = acts and self.settings.action == "requeue"
            names = found.culprits if requeues else ()
            return [effect for name in names for effect in self._requeue(head, name, stalled_s, now)]
        if self._is_stalled and stalled_s < self.settings.stall_s:
            self._is_stalled = False
            self._effects.record(Event.STALL, scope="ring", stalled_s=0.0, verdict="", on="", action="over")
            self._effects.progress("warning", text="the ring moves again")
        return []

    def _abort(self, head: Head, found: StallVerdict, stalled_s: float) -> None:
        sentence = f"nothing moved for {stalled_s:.0f} s: {found.sentence}"
        self._record("ring", stalled_s, sentence, found.culprits, "abort")
        for member in head.state.members.alive():
            self._effects.send(member.name, m.Stop(sentence))
        self._effects.end(1, sentence)

    def _requeue(self, head: Head, name: str, stalled_s: float, now: float) -> list[Effect]:
        """Lease the work of a culprit to other members. A learner holds no such work."""
        member = head.state.members.by_name.get(name)
        if member is None or member.role is Role.LEARNER or member.standing is MemberState.DEAD:
            return []
        text = f"the work of {actor_of(name)} goes to others"
        self._record("member", stalled_s, text, (name,), "requeue")
        self._effects.progress("warning", text=text)
        return head.requeue(name, now)

    # members

    def _check_members(self, head: Head, now: float) -> list[Effect]:
        """Warn about members that hold work and make no progress, whether or not the ring moves."""
        done: list[Effect] = []
        stuck = {
            x.name: (x, s)
            for x in head.state.members.by_name.values()
            if (s := self.tracker.stuck_s(head.state, x)) is not None
        }
        for name in self._member_alarms.keys() - stuck.keys():
            del self._member_alarms[name]
        for name, (member, still_s) in stuck.items():
            alarms = (StallAlarm(self.settings.progress_s), StallAlarm(self.settings.act_s))
            warn_alarm, act_alarm = self._member_alarms.setdefault(name, alarms)
            warns, acts = warn_alarm.is_due(still_s), act_alarm.is_due(still_s)
            if self._is_stalled:  # the ring's verdict names it already
                continue
            if warns:
                held = f" and holds {member.load} samples" if member.load else ""
                note = f" ({member.note})" if member.note else ""
                text = f"{actor_of(name)} has made no progress for {still_s:.0f} s{held}{note}"
                self._warn("member", still_s, text, (name,))
            if acts and self.settings.action == "requeue":
                done += self._requeue(head, name, still_s, now)
        return done

    # output

    def _warn(self, scope: str, stalled_s: float, text: str, on: tuple[str, ...]) -> None:
        self._record(scope, stalled_s, text, on, "warn")
        self._effects.progress("warning", text=text)

    def _record(self, scope: str, stalled_s: float, text: str, on: tuple[str, ...], action: str) -> None:
        fields = {"scope": scope, "stalled_s": round(stalled_s, 3), "verdict": text, "on": " ".join(on)}
        self._effects.record(Event.STALL, **fields, action=action)
