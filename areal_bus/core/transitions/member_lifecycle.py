"""Member lifecycle: join, silence, return, leave, eviction. A lost member's work is leased again (I4)."""

from areal_bus import messages as m
from areal_bus.authorization import index_of, role_of
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.lease_failures import EVICTIONS
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.state import HeadState
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import Role

TELL_AGAIN_S = 2.0
MOST_STRANGERS = 4096  # that are remembered


class MemberLifecycle:
    """Applies changes of membership, and reports losses to the modules that depend on members."""

    def __init__(self, state: HeadState, effects: Effects, rollouts: Rollouts, publisher: Publisher) -> None:
        self.state, self.effects = state, effects
        self.members, self.pushes, self.terms, self.deaths = state.members, state.pushes, state.terms, state.deaths
        self.rollouts = rollouts
        self.publisher = publisher
        self._told: dict[str, tuple[float, int]] = {}  # stranger -> when it was told to join again, and how often
        self._leaving: set[str] = set()
        self._left: set[str] = set()  # guests that asked to leave
        self._directory: m.PeerList | None = None  # that all members were sent

    def answer_stranger(self, sender: str, now: float) -> None:
        """Reply to an unknown sender: an older incarnation, or a member of an earlier head."""
        newer = self.members.replaced_by(sender)
        if newer is not None:
            self.effects.send(sender, m.Stop(f"{newer} has taken its place"))  # I6
        elif now - (known := self._told.get(sender, (-TELL_AGAIN_S, 0)))[0] >= TELL_AGAIN_S:
            if len(self._told) >= MOST_STRANGERS:
                self._told.clear()
            self._told[sender] = now, known[1] + 1
            why = self._stranger_is_misplaced(sender)
            order = m.Reassign(why) if why else m.Rejoin("only a member may speak", self.state.incarnation)
            self.effects.send(sender, order)
        raise ImpossibleEvent(f"only members may send messages; {sender!r} has not joined")

    def _stranger_is_misplaced(self, sender: str) -> str:
        """`_misplaced` for an actor of which the name is known."""
        role = role_of(sender)
        if role in (Role.GENERATOR, Role.LEARNER):
            return self._misplaced(role, index_of(sender))
        return ""

    def heard(self, sender: str, message: m.Message, now: float) -> tuple[Member, bool]:
        """A sign of life. Returns whether something follows. A member taken for dead ends what it held (I4)."""
        known = self.members.by_name[sender]
        is_news = known.is_cut
        if isinstance(message, m.Heartbeat) and (not message.hears or known.cannot_hear_since is not None):
            is_news = self._hears(known, message.hears, now) or is_news
        was_dead = known.standing is MemberState.DEAD and not known.cannot_hear_head
        lost = sorted({lease[:3] for lease in known.leased}) if was_dead else []
        member = self.members.heard(sender, now)
        if known.is_cut:
            self._ask_again(known)
        if was_dead:
            self.effects.record(Event.MEMBER, name=sender, state=str(member.standing), why="heard again")
            self.deaths.back(sender)
            self.rollouts.clear_suspicion({uid for evaluation, uid, _ in lost if not evaluation})
            for evaluation, uid, attempt in lost:
                self.effects.send(sender, m.Cancel(uid, attempt, evaluation))
            self.send_directory(sender)
        return member, was_dead or is_news

    def _hears(self, member: Member, hears: bool, now: float) -> bool:
        """It hears us, or has not for so long that it counts as dead. Returns whether that is news."""
        if hears:
            was_deaf, since = member.cannot_hear_head, member.cannot_hear_since or 0.0
            if was_deaf and self.state.is_guest(member) and now - since < self.state.rules.silent_s:
                return False  # each change is a line of the journal and ends a push
            member.cannot_hear_since, member.cannot_hear_head = None, False
            return was_deaf
        if now < self.members.awake_from:
            return False
        member.cannot_hear_since = now if member.cannot_hear_since is None else member.cannot_hear_since
        waits_s = self.members.limit_s(member, now) - self.members.patience.least_s
        if member.cannot_hear_head or now - member.cannot_hear_since < waits_s:
            return False
        member.cannot_hear_head = True
        self._presume_dead(member, "it does not hear the head")
        return True

    def cut(self, name: str) -> None:
        """Its connection has ended, and what was under way to it and from it is lost."""
        member = self.members.by_name.get(name)
        if member is not None:
            member.is_cut = True
            self._presume_dead(member, "its connection is gone")

    def _presume_dead(self, member: Member, why: str) -> None:
        """Mark it dead and give its leases to others; not for a role that only its next incarnation can replace."""
        if member.can_be_lost:
            self.members.mark_dead(member)
            self.lose(member, why)

    def _ask_again(self, member: Member) -> None:
        """A member came back on a new connection: it must join again if it may have lost messages sent once."""
        member.is_cut = False
        if member.role is not Role.REWARD or not member.ready:
            member.n_asked += 1
            self.effects.send(member.name, m.Rejoin("its connection was broken", self.state.incarnation))

    def join(self, sender: str, message: m.Join, now: float) -> None:
        """A new member, or a known one that forgot everything. Raises ImpossibleEvent for an older incarnation."""
        if sender != message.name:
            raise ImpossibleEvent(f"wrong name in a join: {sender} claims to be {message.name}")
        if sender in self._left:
            self.effects.send(sender, m.Stop("it has left"))
            raise LateEvent(f"{sender} has left: its next incarnation may join")
        if why := self._misplaced(Role(message.role), message.index, message.split):
            self.effects.send(sender, m.Reassign(why))
            raise LateEvent(f"{sender} has no place in this split of ranks: {why}")
        if message.role == Role.GENERATOR and message.index in self.state.evicted:
            self.effects.send(sender, m.Evict("evicted for good: restarts have not helped", for_good=True))
            raise LateEvent(f"{sender} was evicted for good")
        n_asked = self._check_asked(sender, message)
        before = self.members.of(Role(message.role), index=message.index)
        member = self.members.join(message, now)
        if all(other is not member for other in before):
            member.n_asked = n_asked
            for other in before:
                self._forget(other.name, died=other.name != member.name)
            self.effects.record(Event.JOINED, name=member.name, host=message.host, pid=message.pid)
            if member.role is Role.LEARNER:
                self._join_crew(member, is_new=bool(before))
        self.send_directory(sender)

    def _check_asked(self, name: str, message: m.Join) -> int:
        """Rejoins not answered yet. Raises ImpossibleEvent for a guest that joins again without one."""
        known = self.members.by_name.get(name)
        if known is None:
            return self._told.pop(name, (0.0, 0))[1]
        if self.state.is_guest(known) and not known.n_asked and message.again > known.again:
            raise ImpossibleEvent(f"unexpected Join: {name} was not asked to join again")
        return max(0, known.n_asked - 1)

    def _misplaced(self, role: Role, index: int, split: int | None = None) -> str:
        """Why this actor has no place in the split of ranks; "" if it has one. `split`: the number that it knows."""
        pool, current = self.state.rules.pool, self.state.split
        if pool is None or role is Role.REWARD:
            return ""
        is_outdated = role is Role.LEARNER and split is not None and split != current.number
        if is_outdated or not pool.has_place(role, index, current):
            return f"split {current.number} has {current}"
        return ""

    def _join_crew(self, member: Member, *, is_new: bool) -> None:
        """Learner ranks share collectives: if one restarts, all restart from the checkpoint."""
        others = [other for other in self.members.of(Role.LEARNER) if other is not member]
        if is_new or (not member.again and any(other.again for other in others)):
            self.terms.break_crew()
            for other in others:
                self._send_back(other, member)
        elif member.again and (newcomer := next((other for other in others if not other.again), None)):
            self._send_back(member, newcomer)

    def _send_back(self, member: Member, newcomer: Member) -> None:
        self.effects.send(member.name, m.Rejoin(f"{newcomer.name} has restarted", self.state.incarnation, anew=True))
        self._forget(member.name)
        self.members.remove(member.name)

    def leave(self, member: Member) -> None:
        """A generator asks to leave. It is removed when it holds no work."""
        if member.role is not Role.GENERATOR:
            raise ImpossibleEvent(f"only a generator may leave; {member.name} is not one")
        if not member.leaving:
            member.leaving = True
            self._leaving.add(member.name)
            self.effects.record(Event.MEMBER, name=member.name, state=str(member.standing), why="leaves")

    def let_go(self) -> None:
        """Remove generators that asked to leave and hold no work."""
        for name in sorted(self._leaving):
            member = self.members.by_name.get(name)
            if member is None or not member.leaving:  # it died, or has joined anew
                self._leaving.discard(name)
            elif not member.leased and not self.rollouts.holds_any(member.name):
                self._leaving.discard(name)
                if self.state.is_guest(member):
                    self._left = {name} if len(self._left) >= MOST_STRANGERS else self._left | {name}
                self.part_with(member.name, m.Stop("it has left"), "it holds nothing")

    def dismiss(self) -> str | None:
        """Evict generators that miss every push of their own. Returns why the job cannot go on, if so."""
        hopeless = self.publisher.hopeless()
        patience = self.pushes.patience
        generators = self.members.of(Role.GENERATOR)
        standings = {other.standing for other in generators if other.name not in hopeless}
        if not hopeless or (MemberState.STALE in standings and MemberState.HEALTHY not in standings):
            return None  # it is another one's turn
        if not standings and len(hopeless) >= len(self.state.own_generators()):
            name, error = next(iter(hopeless.items()))
            often = f"each missed {patience} pushes of its own in a row"
            return f"no generator completes a push: {often}; the last error: {name}: {error}"
        for name, error in hopeless.items():
            why = f"it missed {patience} pushes of its own in a row; the last error: {error}"
            if end := self._evict(self.members.by_name[name], why):
                return end
        return None

    def pause_failing(self, now: float) -> str | None:
        """Pause generators whose leases fail, evict those that never succeed. Returns why the job ends, if so."""
        for pause in self.state.lease_failures.judge(now):
            member = self.members.by_name.get(pause.name)
            if member is None:
                continue
            if pause.evicts:
                if end := self._evict(member, pause.why):
                    return end
            else:
                self.effects.progress("warning", text=f"{pause.name} is {pause.why}")
                self.effects.record(Event.MEMBER, name=pause.name, state=str(member.standing), why=pause.why)
        return None

    def _evict(self, member: Member, why: str) -> str | None:
        """Evict a generator; for good if no restart has helped it. Returns why the job cannot go on, if so."""
        state = self.state
        n, most = state.lease_failures.evicted(member.name), min(EVICTIONS, state.rules.max_restarts)
        is_last_time = n > most and state.rules.pool is None and not state.is_guest(member)
        own = state.own_generators()
        if is_last_time and own == [member.index]:
            return f"no generator of the job is left: {member.name} was evicted {n} times in a row: {why}"
        there = self.members.of(Role.GENERATOR, MemberState.STALE, MemberState.HEALTHY)
        others = [x for x in there if x is not member and x.index in own and x.version is not None]
        if is_last_time and others:
            state.evicted.add(member.index)
            self.effects.evict_for_good(state.evicted)
            why, for_good = f"evicted for good after {most} restart{'' if most == 1 else 's'}: {why}", True
            text = f"{member.name} is {why}; the job goes on with {len(own) - 1} of {state.split.generators} generators"
        else:
            for_good, text = False, f"{member.name} must go: {why}"
        self.effects.progress("warning", text=text)
        self.part_with(member.name, m.Evict(why, for_good=for_good), why)
        return None

    def part_with(self, name: str, order: m.Stop | m.Evict | m.Reassign, why: str) -> None:
        """Remove a member that left. Its prompts are not suspected of a death."""
        self.effects.send(name, order)
        self.effects.record(Event.MEMBER, name=name, state="left", why=why)
        self._forget(name, died=False)
        self.pushes.forget(name)
        self.members.remove(name)

    def miss(self, until: float, now: float) -> None:
        """At every tick: mark members dead that were silent for too long, and warn. `until`: as in `silent`."""
        for member, limit_s in self.members.silent(until):
            self.lose(member, f"silent for {round(limit_s, 1 if limit_s < 10 else None):g} s")
        for line in self.deaths.tell(now):
            self.effects.progress("warning", text=line)

    def lose(self, member: Member, why: str, *, died: bool = True) -> None:
        self.effects.record(Event.MEMBER, name=member.name, state="dead", why=why)
        self.deaths.add(member.name, why)
        self._forget(member.name, died=died)
        if member.role is Role.REWARD:
            self.send_directory()

    def _forget(self, name: str, *, died: bool = True) -> None:
        self.rollouts.lose(name, died=died)
        self.publisher.lose(name)

    def send_directory(self, to: str = "") -> None:
        """Send the endpoints of all listening members: to all members when they have changed, else to this one."""
        listening = [member for member in self.members.alive() if member.endpoint]
        directory = m.PeerList([x.name for x in listening], [x.endpoint for x in listening], self.state.incarnation)
        has_changed, self._directory = directory != self._directory, directory
        for member in self.members.alive():
            if has_changed or member.name == to:
                self.effects.send(member.name, directory)
