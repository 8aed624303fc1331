"""Publishes versions: starts pushes, records which generators completed them, and publishes the version.

A regular push sends the newest version to the generators that are in step. A catch-up push sends it to late ones. A
generator that missed a push gets a push of its own. A late generator waits for at most one regular push. At most one
push is in flight. A wrong digest breaks the push (I5). Only a completed push makes a generator HEALTHY (I7).
"""

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.push_queue import OWN_SHARE, Push
from areal_bus.core.parts.stages import in_force
from areal_bus.core.state import HeadState
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role

STAGE_FIELDS = ("n_samples", "max_new_tokens", "max_tokens_per_mb")


class Publisher:
    """Owns the pushes and the digests of the versions that may still be pushed."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        self.state, self.effects = state, effects
        self.gate, self.members, self.pushes = state.gate, state.members, state.pushes
        self.term = self.base = 0
        self.root: str | None = None  # learner 0 of this term: only it holds the versions that may be pushed
        self._digests: dict[int, str] = {}
        self._owes_late = False  # the last push was regular: late members are next, or they would wait for ever

    def restart(self, term: int, version: int, digest: str, *, root: str) -> None:
        """A term begins: `version` counts as published, and every generator waits for a catch-up push of it."""
        self.term, self.base, self.root = term, version, root
        self.pushes.restart()
        self._digests = {version: digest}
        for member in self.members.of(Role.GENERATOR):
            self.members.fence(member.name)
            if member.version is not None and member.version > version:
                member.version = None

    def snapshot(self, version: int, digest: str) -> None:
        """Learner 0 holds `version` ready for pushes."""
        self._digests[version] = digest

    def is_digest(self, version: int, digest: str) -> bool:
        """Whether this version was made in this term, with this digest."""
        return self._digests.get(version) == digest

    def done(self, member: Member, message: m.PushDone) -> None:
        """A member (or the root) completed its part. Raises ImpossibleEvent for a push that is not in flight."""
        self._check_version(message)
        if message.digest != self._digests.get(message.version):  # I5
            self.broken(member, m.PushBroken(message.push, message.version, "what it holds has another digest"))
            return
        self.pushes.done(message.push, member.name)
        if member.role is Role.GENERATOR:
            self.members.holds(member.name, message.version)
            self.effects.record(
                Event.MEMBER,
                name=member.name,
                state=str(member.standing),
                why=f"holds version {message.version}",
                version=message.version,
            )

    def broken(self, member: Member, message: m.PushBroken) -> None:
        """A member (or the root) could not complete its part."""
        self._check_version(message)
        self.pushes.broken(message.push, member.name, message.error)
        self.effects.record(
            Event.PUSH_BROKEN, push=message.push, version=message.version, name=member.name, error=message.error
        )
        self.effects.progress("warning", text=f"push of version {message.version}: {member.name}: {message.error}")

    def _check_version(self, message: m.PushDone | m.PushBroken) -> None:
        """All pushes in flight have one version (I5)."""
        push = self.pushes.current
        if push is not None and push.id == message.push and push.version != message.version:
            versions = f"it is of version {push.version}, the report of {message.version}"
            raise ImpossibleEvent(f"version mismatch in push {push.id}: {versions}")

    def lose(self, name: str) -> None:
        """A member died: the root need not wait for it until the deadline."""
        push = self.pushes.current
        is_awaited = push is not None and name in push.members and name not in push.done
        self.pushes.lose(name)
        if push is not None and is_awaited:
            self.effects.send(push.root, m.PushBroken(push.id, push.version, f"{name} is dead"))
        if name not in self.members.by_name:
            self.pushes.forget(name)

    def expire(self, now: float) -> None:
        """At the deadline of a push, stop waiting for members that have not answered."""
        for name in self.pushes.expire(now):
            if (push := self.pushes.current) is not None:
                error = push.broken[name]
                self.effects.record(Event.PUSH_BROKEN, push=push.id, version=push.version, name=name, error=error)

    def close(self, now: float) -> None:
        """End the push that is over."""
        push = self.pushes.current
        if push is None or not push.is_over:
            return
        self.pushes.finish(now)
        for name in push.missing:
            if name in self.members.by_name:
                self.members.fence(name)
        self._owes_late = not push.catch_up
        if not push.catch_up:
            self._publish(push.version, n_members=len(push.members) - len(push.missing))

    def begin(self, now: float) -> None:
        """The next push, when none is in flight and somebody lacks the newest version."""
        if self.pushes.current is None:
            self._begin(now)

    def record_stage(self, version: int, *, before: int | None = None) -> None:
        """Record the stage in force at `version`, unless it was in force at version `before`, too."""
        stages = self.state.rules.stages
        starts = [stage.from_step for stage in stages]
        if len(stages) < 2 or (before is not None and in_force(starts, before) == in_force(starts, version)):
            return
        index = in_force(starts, version)
        stage = stages[index]
        found = {name: getattr(stage, name) for name in STAGE_FIELDS}
        self.effects.record(Event.STAGE, stage=index, from_step=stage.from_step, version=version, **found)
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        text = f"stage {index + 1} of {len(stages)} at version {version} (from step {stage.from_step}): {listed}"
        self.effects.progress("note", name="head", text=text)

    def errors(self) -> dict[str, str]:
        """Quarantined members, and the last error of each."""
        return {name: apart.error for name, apart in self.pushes.quarantined.items()}

    def hopeless(self) -> dict[str, str]:
        """Members, alive, that missed too many pushes of their own in a row, and the last error."""
        alive = {member.name for member in self.members.of(Role.GENERATOR, MemberState.STALE)}
        return {name: error for name, error in self.pushes.hopeless().items() if name in alive}

    def _publish(self, version: int, *, n_members: int) -> None:
        """Publish the version: credits return, and members without this version are fenced (I7, I11)."""
        before = self.gate.v
        self.gate.publish(version)
        for old in [v for v in self._digests if v < version]:
            del self._digests[old]
        for member in self.members.of(Role.GENERATOR, MemberState.HEALTHY):
            if member.version is None or member.version < version:  # I7
                self.members.fence(member.name)
        self.effects.record(Event.PUBLISH, version=version, v=self.gate.v, members=n_members)
        self.record_stage(version, before=before)

    def _begin(self, now: float) -> None:
        version = self.gate.u
        behind, late = version > self.gate.v, self._late(now)
        if not behind and not late:
            return
        root = next((x for x in self.members.of(Role.LEARNER, MemberState.HEALTHY) if x.name == self.root), None)
        if root is None or version not in self._digests:
            return
        if behind and not (late and self._owes_late):
            names = self._those_in_step(version)
        else:
            names, behind = late, False
        if names:
            push = self.pushes.begin(version=version, root=root.name, members=names, catch_up=not behind, now=now)
            self._announce(push, root.endpoint)
        else:
            held = [x for x in self.members.of(Role.GENERATOR, MemberState.HEALTHY) if x.version == version]
            self._publish(version, n_members=len(held))

    def _those_in_step(self, version: int) -> list[str]:
        """Members of a regular push: those that completed one before; if none, all that are not quarantined."""
        there = [x for x in self.members.of(Role.GENERATOR, MemberState.HEALTHY) if x.version != version]
        there += self.members.of(Role.GENERATOR, MemberState.STALE)
        together = [x for x in sorted(there, key=lambda x: x.index) if x.name not in self.pushes.quarantined]
        return [x.name for x in together if x.version is not None] or [x.name for x in together]

    def _late(self, now: float) -> list[str]:
        """Members of a catch-up push: all stale ones that are not quarantined, or else the next quarantined one."""
        stale = [x.name for x in self.members.of(Role.GENERATOR, MemberState.STALE)]
        if not stale:
            return stale
        together = [name for name in stale if name not in self.pushes.quarantined]
        if together:
            return together
        return self.pushes.next_quarantined([name for name in stale if name in self.pushes.quarantined], now)

    def _announce(self, push: Push, store: str) -> None:
        own_s, term, base = OWN_SHARE * self.pushes.timeout_s, self.term, self.base
        begin = m.PushBegin(push.id, push.version, push.view, push.members, store, own_s, term, base)
        for name in (push.root, *push.members):
            self.effects.send(name, begin)
        self.effects.record(
            Event.PUSH,
            push=push.id,
            version=push.version,
            view=push.view,
            n_members=len(push.members),
            catch_up=push.catch_up,
        )
