"""The watchdog of the head's shell: registers who waits for whom, says so when nothing moves, and acts by config.

It looks at the pure head once a second and returns effects like the head's own; it carries out none of them.
"""

from dataclasses import dataclass

from areal_bus import messages as m
from areal_bus.config.sections import WatchdogConfig
from areal_bus.core.effects import Effect, Effects
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.membership import MemberState
from areal_bus.core.progress_tracker import ProgressTracker, place
from areal_bus.core.state import Phase
from areal_bus.core.wait_graph import StallVerdict, Wait, verdict
from areal_bus.messages import Role

LOOK_S = 1.0  # between two looks
REGISTER_S = 5.0  # between two registers of waits in the journal
REFRESH_S = 60.0  # between two that say the same
QUIET_BEATS = 3  # heartbeats that may be missed
NOBODY = Wait("", "", (), 0.0)


@dataclass(slots=True)
class StallAlarm:
    """Rings when something has lasted `after_s`, then at twice that, and so on; silent again once it moves."""

    after_s: float
    next_s: float = 0.0

    def rings(self, lasted_s: float) -> bool:
        if lasted_s < self.after_s:
            self.next_s = self.after_s
        if lasted_s < max(self.next_s, self.after_s):
            return False
        self.next_s = max(self.next_s, self.after_s)
        while self.next_s <= lasted_s:
            self.next_s *= 2
        return True


class StallMonitor:
    """One for the ring as a whole, and one for each member that stands still with work in its hands."""

    def __init__(self, settings: WatchdogConfig, *, heartbeat_s: float) -> None:
        self.settings = settings
        self.watch = ProgressTracker(quiet_s=QUIET_BEATS * heartbeat_s, still_s=settings.progress_s)
        self._looked_s: float | None = None  # by the head's clock
        self._registered_s: float | None = None
        self._register: object = None  # what was written last
        self._tell, self._act = StallAlarm(settings.stall_s), StallAlarm(settings.act_s)
        self._is_stalled = False  # and said to be
        self._of_members: dict[str, tuple[StallAlarm, StallAlarm]] = {}  # of those that stand still
        self._effects = Effects()

    def look(self, head: Head, now: float) -> list[Effect]:
        """Call it at every tick, after the head's own: what is to be written, said and done."""
        if head.phase is Phase.STOPPING or (self._looked_s is not None and now - self._looked_s < LOOK_S):
            return []
        self._looked_s = now
        self.watch.look(head, now)
        self._look_at_waits(head, now)
        done = self._look_at_ring(head, now)
        return [*done, *self._effects.take()] if done else [*self._look_at_members(head, now), *self._effects.take()]

    # the register of waits

    def _look_at_waits(self, head: Head, now: float) -> None:
        """Write down the waits when they have changed, but not too often."""
        age_s = None if self._registered_s is None else now - self._registered_s
        if age_s is not None and age_s < REGISTER_S:
            return
        found = verdict(head, self.watch, now)
        register = tuple((wait.who, wait.on) for wait in found.waits), found.culprits
        if register == self._register and age_s is not None and age_s < REFRESH_S:
            return
        self._register, self._registered_s = register, now
        for i, wait in enumerate(found.waits or (NOBODY,)):
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

    def _look_at_ring(self, head: Head, now: float) -> list[Effect]:
        """Say the verdict when nothing has moved for long, and take the action later. Returns the action's effects."""
        stalled_s = self.watch.stalled_s
        tells, acts = self._tell.rings(stalled_s), self._act.rings(stalled_s)
        found = verdict(head, self.watch, now) if tells or acts else None
        if found is not None and acts and (self.settings.action == "abort" or self._is_hopeless(found)):
            self._is_stalled = True
            self._abort(head, found, stalled_s)
            return []
        if found is not None and (tells or self.settings.action == "requeue"):
            self._is_stalled = True
            self._say("ring", stalled_s, f"nothing has moved for {stalled_s:.0f} s: {found.sentence}", found.culprits)
            requeues = acts and self.settings.action == "requeue"
            names = found.culprits if requeues else ()
            return [effect for name in names for effect in self._requeue(head, name, stalled_s, now)]
        if self._is_stalled and stalled_s < self.settings.stall_s:
            self._is_stalled = False
            self._effects.record(Event.STALL, scope="ring", stalled_s=0.0, verdict="", on="", action="over")
            self._effects.progress("warning", text="the ring moves again")
        return []

    def _is_hopeless(self, found: StallVerdict) -> bool:
        """Whether a role of which somebody must work has nobody who does: that does not mend itself."""
        return bool(found.absent) and self.settings.absent_action == "abort"

    def _abort(self, head: Head, found: StallVerdict, stalled_s: float) -> None:
        sentence = f"nothing moved for {stalled_s:.0f} s: {found.sentence}"
        self._write("ring", stalled_s, sentence, found.culprits, "abort")
        for member in head.members.alive():
            self._effects.send(member.name, m.Stop(sentence))
        self._effects.end(1, sentence)

    def _requeue(self, head: Head, name: str, stalled_s: float, now: float) -> list[Effect]:
        """What one to blame holds goes to others; a learner holds nothing that others could do."""
        member = head.members.by_name.get(name)
        if member is None or member.role is Role.LEARNER or member.standing is MemberState.DEAD:
            return []
        text = f"the work of {place(name)} goes to others"
        self._write("member", stalled_s, text, (name,), "requeue")
        self._effects.progress("warning", text=text)
        return head.requeue(name, now)

    # members

    def _look_at_members(self, head: Head, now: float) -> list[Effect]:
        """Name those that stand still with work in their hands, whether or not the ring moves."""
        done: list[Effect] = []
        stuck = {
            x.name: (x, s) for x in head.members.by_name.values() if (s := self.watch.stuck_s(head, x)) is not None
        }
        for name in self._of_members.keys() - stuck.keys():
            del self._of_members[name]
        for name, (member, still_s) in stuck.items():
            alarms = (StallAlarm(self.settings.progress_s), StallAlarm(self.settings.act_s))
            tell, act = self._of_members.setdefault(name, alarms)
            tells, acts = tell.rings(still_s), act.rings(still_s)
            if self._is_stalled:  # the verdict on the ring names it
                continue
            if tells:
                held = f" and holds {member.load} samples" if member.load else ""
                note = f" ({member.note})" if member.note else ""
                text = f"{place(name)} has made no progress for {still_s:.0f} s{held}{note}"
                self._say("member", still_s, text, (name,))
            if acts and self.settings.action == "requeue":
                done += self._requeue(head, name, still_s, now)
        return done

    # words

    def _say(self, scope: str, stalled_s: float, text: str, on: tuple[str, ...]) -> None:
        self._write(scope, stalled_s, text, on, "warn")
        self._effects.progress("warning", text=text)

    def _write(self, scope: str, stalled_s: float, text: str, on: tuple[str, ...], action: str) -> None:
        fields = {"scope": scope, "stalled_s": round(stalled_s, 3), "verdict": text, "on": " ".join(on)}
        self._effects.record(Event.STALL, **fields, action=action)
