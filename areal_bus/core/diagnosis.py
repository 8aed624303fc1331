"""Explains a stall: when each part last made progress, and who waits for whom (the wait-for graph).

Reads the head's state, changes nothing. A lost lease, a broken push and a member's state are no progress.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from areal_bus.core.members.lease_failures import actor_of
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.ledger import LedgerEntry, PromptState
from areal_bus.core.parts.split import N_NAMED, count, first_few
from areal_bus.core.state import HeadState, Phase
from areal_bus.messages import Role

GAP_S = 30.0  # a longer time between two checks: the head itself was stopped, and it counts as no wait


class Since:
    """Values by key, and since when each is what it is."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, float]] = {}

    def update(self, values: Mapping[str, object] | Mapping[int, object], t: float) -> bool:
        """All values now. Returns whether one came or changed."""
        before: dict[Hashable, tuple[object, float]] = self._known
        now: dict[Hashable, tuple[object, float]] = {}
        moved = False
        for key, value in values.items():
            known = before.get(key)
            if known is None or known[0] != value:
                known = (value, t)
                moved = True
            now[key] = known
        self._known = now
        return moved

    def of(self, key: Hashable, t: float) -> float:
        """Since when; `t` itself for what is not known."""
        return self._known[key][1] if key in self._known else t


class ProgressTracker:
    """When each thing moved last, to the precision of the looks."""

    def __init__(self, *, quiet_s: float, still_s: float) -> None:
        """`quiet_s`: a member not heard for longer is silent. `still_s`: one at work without progress is stuck."""
        self.quiet_s = quiet_s
        self.still_s = still_s
        self.t = 0.0  # seconds of all looks, without gaps between them
        self.moved = 0.0  # when the ring moved last
        self._last: float | None = None  # the last look by the head's clock
        self.ring, self.progress, self.prompts = Since(), Since(), Since()  # what moves when the ring does
        self.leases, self.notes, self.standings = Since(), Since(), Since()

    def look(self, state: HeadState, now: float) -> None:
        """Remember what moved since the last look."""
        gap_s = 0.0 if self._last is None else now - self._last
        self._last = now
        self.t += gap_s if gap_s <= GAP_S else 0.0
        members, live = state.members.by_name.values(), state.ledger.live()
        moved = [
            self.ring.update(_ring(state), self.t),
            self.progress.update({x.name: (x.progress, x.ready) for x in members}, self.t),
            self.prompts.update({x.uid: (len(x.sampled), len(x.scored) + len(x.failed)) for x in live}, self.t),
        ]
        if any(moved):
            self.moved = self.t
        self.leases.update({x.uid: (x.attempt, x.holder) for x in live}, self.t)
        self.notes.update({x.name: x.note for x in members}, self.t)
        self.standings.update({x.name: x.standing for x in members}, self.t)

    @property
    def stalled_s(self) -> float:
        """How long nothing has moved."""
        return self.t - self.moved

    def age(self, table: Since, key: Hashable) -> float:
        """How long a value has been what it is."""
        return self.t - table.of(key, self.t)

    @staticmethod
    def _allowance(state: HeadState, member: Member, now: float) -> float:
        """How much longer than on an idle machine it may be silent."""
        return state.members.limit_s(member, now) - state.members.patience.least_s

    def stuck_s(self, state: HeadState, member: Member) -> float | None:
        """How long a member at work has made no progress; None when it does, or has no work."""
        still_s = self.age(self.progress, member.name)
        return still_s if still_s > self.still_s and _is_at_work(state, member) else None

    def suspects(self, state: HeadState, now: float, awaited: Sequence[str]) -> dict[str, str]:
        """Members that are dead, silent or stuck, with what is wrong; those awaited come first."""
        found: dict[str, str] = {}
        for name in dict.fromkeys((*awaited, *state.members.by_name)):
            member = state.members.by_name.get(name)
            wrong = "" if member is None else self._wrong(state, member, now, is_awaited=name in awaited)
            if wrong:
                found[name] = f"{actor_of(name)} {wrong}"
        return found

    def _wrong(self, state: HeadState, member: Member, now: float, *, is_awaited: bool) -> str:
        silent_s = now - member.heard
        if member.standing is MemberState.DEAD:  # its work is with others: only who waits for it cares
            return f"dead, silent for {silent_s:.0f} s" if is_awaited else ""
        if silent_s > self.quiet_s and silent_s > self.quiet_s + self._allowance(state, member, now):
            return f"silent for {silent_s:.0f} s"
        stuck_s = self.stuck_s(state, member)
        if stuck_s is not None:
            return f"stands still for {stuck_s:.0f} s" + (f" ({member.note})" if member.note else "")
        return ""


def _ring(state: HeadState) -> dict[str, object]:
    """Counts that move when the ring does. A lost lease, a push or a change of standing alone is no move."""
    gate, ledger, evaluation = state.gate, state.ledger, state.evaluations.open
    return {
        "phase": state.phase,
        "u": gate.u,
        "v": gate.v,
        "w": gate.w,
        "asked": tuple(sorted(state.terms.requests)),
        "admitted": ledger.next_uid,
        "refunded": ledger.refunds.total(),
        "finished": tuple(state.terms.finished),
        "evaluation": None if evaluation is None else evaluation.name,
        "evaluated": 0 if evaluation is None else len(evaluation.scored) + len(evaluation.failed),
    }


def _is_at_work(state: HeadState, member: Member) -> bool:
    """Whether its progress counter should increase. The head knows its work; a reward reports it in its heartbeat."""
    if member.standing is MemberState.DEAD:
        return False
    if member.role is Role.LEARNER:
        return state.gate.w > state.gate.u
    if member.role is Role.REWARD:
        return bool(member.note) and not member.note.startswith("waits")
    return member.load > 0 and member.version is not None


WORKING = (MemberState.STALE, MemberState.HEALTHY)


@dataclass(frozen=True, slots=True)
class Wait:
    """`who` is blocked until `for_what`."""

    who: str
    for_what: str
    on: tuple[str, ...]  # members that it depends on; who has not joined is named without an incarnation
    since_s: float  # how long it has lasted
    detail: str = ""  # how things stand

    def __str__(self) -> str:
        verb = "wait" if self.who.endswith("s") else "waits"
        return f"{self.who} {verb} for {self.for_what}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """Why the ring makes no progress, if it makes none."""

    sentence: str
    culprits: tuple[str, ...]  # members to blame, the likeliest first; without a suspect those waited for
    waits: tuple[Wait, ...]
    absent: tuple[Role, ...] = ()  # roles that the ring needs and that nobody fills


def verdict(state: HeadState, watch: ProgressTracker, now: float) -> StallVerdict:
    """The current waits and their summary. `watch` must be up to date."""
    return _Moment(state, watch, now).verdict()


class _Moment:
    """The state of the head at time `now`."""

    def __init__(self, state: HeadState, watch: ProgressTracker, now: float) -> None:
        self.state, self.watch, self.now = state, watch, now
        self.rules, self.gate, self.members = state.rules, state.gate, state.members
        self.ledger, self.evaluation = state.ledger, state.evaluations.open
        self.learners = tuple(x.name for x in self.members.of(Role.LEARNER))

    def verdict(self) -> StallVerdict:
        if self.state.phase is Phase.STOPPING:
            return StallVerdict("the job ends", (), ())
        waits = [wait for wait in self._ways() if wait is not None]
        suspects = self.watch.suspects(self.state, self.now, [name for wait in waits for name in wait.on])
        said = [*map(str, waits[:N_NAMED]), *list(suspects.values())[:N_NAMED]]
        culprits = tuple(suspects) or (waits[0].on if waits else ())
        absent = tuple(role for role in (Role.GENERATOR, Role.REWARD) if self._is_absent(role))
        return StallVerdict("; ".join(said) or "nobody waits", culprits, (*waits, *self._idle()), absent)

    def _ways(self) -> list[Wait | None]:
        """Possible waits of the ring. Those that wait for all others come first."""
        return [
            self._assembly() if self.state.phase is Phase.ASSEMBLING else self._term(),
            self._problems(),
            self._batch(),
            self._request(),
            self._update(),
            self._push(),
            self._version(),
            self._nobody(Role.GENERATOR, "prompts"),
            self._nobody(Role.REWARD, "samples"),
            self._end(),
        ]

    # the ring and its members

    def _assembly(self) -> Wait:
        rules, split, missing = self.rules, self.state.split, []
        fed = {x.name for x in self.state.eligible_generators()}
        needed: dict[Role, Iterable[int]] = {Role.LEARNER: range(split.learners)}
        if not self.members.of(Role.REWARD, MemberState.HEALTHY):
            needed[Role.REWARD] = range(rules.n_rewards)
        if not fed or rules.eta == 0:
            needed[Role.GENERATOR] = self.state.own_generators()
        left_out = {x.name for x in self.state.excluded_generators()} if fed else set()
        for role, indices in needed.items():
            known = {x.index: x for x in self.members.of(role)}
            for index in indices:
                member = known.get(index)
                if member is None:
                    missing.append((f"{role}-{index}", f"nobody has joined as {role}-{index}"))
                elif member.standing is not MemberState.HEALTHY and member.name not in left_out:
                    missing.append((member.name, f"{actor_of(member.name)} {member.note or member.standing}"))
        for_what = first_few([actor_of(name) for name, _ in missing]) or "learner-0 to begin"
        on = tuple(name for name, _ in missing) or self.learners[:1]
        return Wait("the ring", for_what, on, self._age("phase"), first_few([why for _, why in missing]))

    def _term(self) -> Wait | None:
        """Learner 0 has not begun a term: everything waits for it."""
        if self.state.terms.begun_by is not None:
            return None
        learners = self.members.of(Role.LEARNER)
        on = self.learners or ("learner-0",)
        since_s = self._standing_s(on)
        return Wait("the ring", "learner-0 to begin", on, since_s, self._notes(learners, since_s))

    def _nobody(self, role: Role, who: str) -> Wait | None:
        """No member of this role can work, and no push in progress will change that."""
        members = self.members.of(role)
        if self.state.phase is Phase.ASSEMBLING or any(x.standing in WORKING for x in members):
            return None
        on = tuple(x.name for x in members) or (f"{role}-0",)
        said = [f"{actor_of(x.name)} is {x.standing}" + (f", {x.note}" if x.note else "") for x in members]
        return Wait(who, f"a {role}", on, self._standing_s(on), first_few(said) or f"no {role} has joined")

    def _is_absent(self, role: Role) -> bool:
        """No member of this role exists or is starting. Before the first step other deadlines apply."""
        is_there = any(x.standing is not MemberState.DEAD for x in self.members.of(role))
        return not is_there and self.state.phase is not Phase.ASSEMBLING

    def _idle(self) -> list[Wait]:
        """The waits that actors report in their heartbeats, equal ones in one line."""
        alike: dict[tuple[Role, str], list[Member]] = {}
        for x in self.members.alive():
            if x.note.startswith("waits for "):
                kind = "".join(c for c in x.note if not c.isdecimal())
                alike.setdefault((x.role, kind), []).append(x)
        found = []
        for group in alike.values():
            since_s = max(self.watch.age(self.watch.notes, x.name) for x in group)
            who, what = first_few([actor_of(x.name) for x in group]), group[0].note.removeprefix("waits for ")
            found.append(Wait(who, what, (), since_s))
        return found

    # data

    def _problems(self) -> Wait | None:
        evaluation = self.evaluation
        if evaluation is None:
            return None
        at: dict[str, int] = {}
        for uid, holder in evaluation.leased.items():
            member = self.members.by_name.get(holder)
            samples = member is not None and any(x[:2] == (evaluation.name, uid) for x in member.leased)
            at[holder if samples else "the rewards"] = at.get(holder if samples else "the rewards", 0) + 1
        n_scored = at.pop("the rewards", 0)
        places = [f"{n} at {actor_of(holder)}" for holder, n in at.items()]
        places += [f"{n_scored} at the rewards"] if n_scored else []
        places += [f"{len(evaluation.waiting)} not leased"] if evaluation.waiting else []
        on = (*at, *(self._scorers() if n_scored else ()))
        who, n = f"evaluation '{evaluation.name}'", len(evaluation.waiting) + len(evaluation.leased)
        return Wait(who, count(n, "problem"), on, self._age("evaluated"), first_few(places))

    def _batch(self) -> Wait | None:
        """The learner has requested a batch that is not complete."""
        if not self._is_asked:
            return None
        who = "learner-0" if self.state.split.learners == 1 else "learners"
        under_way = [x for x in self.ledger.live() if x.state is not PromptState.READY]
        under_way.sort(key=lambda entry: (entry.born, entry.uid))
        n_ready, size = len(self.ledger.ready), self.rules.batch_size
        if n_ready >= size:  # the policy `hold` wants older ones first
            first = under_way[:1]
            what = f"prompt {first[0].uid}, which must be in batch {self.gate.w}" if first else f"batch {self.gate.w}"
            places, on = self._places(first)
            return Wait(who, what, on, self._age("asked"), first_few([*places, f"{n_ready} ready"]))
        awaited = under_way[: size - n_ready]
        n_unborn = 0 if self.state.rows.is_exhausted else size - n_ready - len(awaited)
        places, on = self._places(awaited)
        places += [f"{count(n_unborn, 'prompt')} not admitted: {self._why_none()}"] if n_unborn else []
        n = sum(len(entry.missing) for entry in awaited) + n_unborn * self.rules.samples_at(self.gate.v)
        what = f"{n} trajector{'y' if n == 1 else 'ies'} of step {self.gate.w}"
        return Wait(who, what, on, self._age("asked"), first_few(places))

    def _why_none(self) -> str:
        """Why no more prompts are leased."""
        gate, fed = self.gate, self.state.eligible_generators()
        if self.state.is_draining:
            return "the run drains"
        if gate.free <= 0:
            return f"the gate is shut, {gate.live} live + {gate.in_training} in training of {gate.limit}"
        if not fed:
            return f"no generator holds version {gate.v}"
        if all(x.room < self.rules.samples_at(gate.v) and x.load for x in fed):
            return "every generator is full"
        return "the share of every generator is given out at once" if self.rules.eta == 0 else "the gate waits for room"

    def _places(self, entries: Iterable[LedgerEntry]) -> tuple[list[str], tuple[str, ...]]:
        """The states of these prompts and their holders, longest first."""
        watch = self.watch
        held: dict[str | None, list[tuple[float, int]]] = {}  # holder -> (age, uid); None: queued
        unscored: list[tuple[float, int]] = []  # (age, samples)
        compared: list[LedgerEntry] = []
        for entry in entries:
            if entry.state is PromptState.COMPARING:
                compared.append(entry)
            if len(entry.sampled) < entry.n_samples:
                held.setdefault(entry.holder, []).append((watch.age(watch.leases, entry.uid), entry.uid))
            n_unscored = len(entry.sampled) - len(entry.verdicts)
            if n_unscored > 0 and entry.holder is not None:
                unscored.append((watch.age(watch.prompts, entry.uid), n_unscored))
        said: list[tuple[float, str]] = []
        for holder, prompts in held.items():
            age, uid = max(prompts)
            where = "queued" if holder is None else f"at {actor_of(holder)}"
            more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
            said.append((age, f"prompt {uid}{more} {where} since {age:.0f} s"))
        if unscored:
            age, _ = max(unscored)
            said.append((age, f"{count(sum(n for _, n in unscored), 'sample')} at the rewards since {age:.0f} s"))
        if compared:
            age = max(watch.age(watch.prompts, entry.uid) for entry in compared)
            said.append((age, f"{count(len(compared), 'group')} compared by the rewards since {age:.0f} s"))
        asked = sorted({entry.asked for entry in compared if entry.asked})
        holders = sorted((max(held[name])[0], name) for name in held if name is not None)
        on = [name for _, name in reversed(holders)] + (self._scorers() if unscored else [])
        return [text for _, text in sorted(said, reverse=True)], tuple(on + asked)

    # the learner and its versions

    @property
    def _is_asked(self) -> bool:
        trains = self.state.phase is Phase.TRAINING and self.gate.w == self.gate.u
        return trains and len(self.state.terms.requests) == self.state.split.learners

    def _request(self) -> Wait | None:
        """A learner rank neither trains nor requests a batch; for example, it writes a checkpoint."""
        is_due = self.state.phase is Phase.TRAINING and self.gate.w == self.gate.u and self.state.terms.begun_by
        if not is_due or self._is_asked:
            return None
        there = self.members.of(Role.LEARNER)
        late = [x for x in there if x.index not in self.state.terms.requests]
        missing = set(range(self.state.split.learners)) - {x.index for x in there}
        on = (*(x.name for x in late), *(f"learner-{i}" for i in sorted(missing)))
        for_what = f"{first_few([actor_of(name) for name in on])} to ask for it"
        since_s = min(self._age("asked"), self._age("u"))
        return Wait(f"batch {self.gate.w}", for_what, on, since_s, self._notes(late, since_s))

    def _update(self) -> Wait | None:
        if self.gate.w == self.gate.u:
            return None
        learners = self.members.of(Role.LEARNER)
        on = tuple(x.name for x in learners) or ("learner-0",)
        for_what, since_s = first_few([actor_of(name) for name in on]), self._age("w")
        return Wait(f"version {self.gate.u + 1}", for_what, on, since_s, self._notes(learners, since_s))

    def _push(self) -> Wait | None:
        pushes = self.state.pushes
        push = pushes.current
        if push is None:
            return None
        on = [name for name in (push.root, *push.members) if name not in push.done | push.broken.keys()]
        left_s = max(0.0, push.deadline - self.now)
        since_s = pushes.timeout_s - left_s
        detail = f"no answer for {since_s:.0f} s, deadline in {left_s:.0f} s"
        return Wait(f"push of version {push.version}", first_few([actor_of(x) for x in on]), tuple(on), since_s, detail)

    def _version(self) -> Wait | None:
        """Generators that need a push before they get work, while no push is in flight."""
        behind = [x for x in self.members.of(Role.GENERATOR, MemberState.STALE) if not x.leaving]
        if self.state.pushes.current is not None or not (behind or self.gate.u > self.gate.v):
            return None
        who = first_few([actor_of(x.name) for x in behind]) if 0 < len(behind) <= N_NAMED else "generators"
        ages = [self.watch.age(self.watch.standings, x.name) for x in behind]
        on = self.learners[:1] or ("learner-0",)
        return Wait(who, f"a push of version {self.gate.u}", on, max(ages, default=self._age("u")), "none is in flight")

    def _end(self) -> Wait | None:
        state, n_learners = self.state, self.state.split.learners
        if state.phase is not Phase.AFTER or self.evaluation is not None or len(state.terms.finished) == n_learners:
            return None
        late = [x for x in self.members.of(Role.LEARNER) if x.index not in state.terms.finished]
        on, since_s = tuple(x.name for x in late), self._age("phase")
        return Wait("the end", first_few([actor_of(name) for name in on]), on, since_s, self._notes(late, since_s))

    def _scorers(self) -> list[str]:
        """Rewards that may hold a sample: those that report scores in progress, else all."""
        rewards = self.members.of(Role.REWARD)
        alive = [x.name for x in rewards if x.standing is not MemberState.DEAD]
        busy = [x.name for x in rewards if x.name in alive and not x.note.startswith("waits")]
        return busy or alive or [x.name for x in rewards]

    # words

    def _age(self, what: str) -> float:
        return self.watch.age(self.watch.ring, what)

    def _standing_s(self, names: Iterable[str]) -> float:
        """How long the state of at least one of them has not changed."""
        return min((self.watch.age(self.watch.standings, name) for name in names), default=0.0)

    def _notes(self, members: Iterable[Member], since_s: float) -> str:
        """The notes of these members, if they are recent enough to describe this wait."""
        if since_s < self.watch.quiet_s:
            return ""
        return first_few([f"{actor_of(x.name)} {x.note}" for x in members if x.note])
