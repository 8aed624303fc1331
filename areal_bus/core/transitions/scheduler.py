"""The scheduler: leases work to generators.

The least loaded generator that holds the published version (I7) is served first. The order of work is: problems of an
evaluation, prompts with a lost lease, then new prompts as the gate permits (I1). In training at eta > 0 an evaluation
may hold only a share of each generator's slots (docs/evaluation.md). A generator that fails while others succeed is
paused and gets one group at a time (core/members/lease_failures.py); a prompt at which it failed goes to another one.
"""

from heapq import heapify, heappop, heappush, heapreplace

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.evaluation import Evaluation
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.ledger import LedgerEntry
from areal_bus.core.rows import IssuedRow, oversize
from areal_bus.core.state import HeadState, Phase
from areal_bus.messages import Role

POISON_THRESHOLD = 2  # deaths of its holders after which a prompt is sampled alone

Place = tuple[float, int, Member]  # by load, then by index, of which there is one each


class Scheduler:
    """Spends the gate's credits. Updates the ledger and the leases of members."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        self.state, self.effects = state, effects
        self.rules, self.gate, self.members, self.rows = state.rules, state.gate, state.members, state.rows
        self.ledger, self.partials, self.evaluations = state.ledger, state.partials, state.evaluations
        self.failures = state.lease_failures
        self._unsendable: list[tuple[LedgerEntry, str]] = []  # prompts whose row no message holds, and why

    def take_unsendable(self) -> list[tuple[LedgerEntry, str]]:
        """Prompts that were leased and cannot be sent, with the reason. The caller refunds them."""
        taken, self._unsendable = self._unsendable, []
        return taken

    def lease_all(self, *, admitting: bool) -> None:
        """Give work to the least loaded while there is work, leave and room; at eta = 0 the whole batch in shares."""
        if not self._has_work(admitting):
            return
        fed = self._not_paused(self.state.eligible_generators())
        order = self._by_load(fed)
        passed_over: list[Place] = []
        while order and self._has_work(admitting):
            member = order[0][2]
            if not self._lease_one(member, admitting=admitting):
                passed_over.append(heappop(order))
                continue
            heapreplace(order, _place(member))
            for place in passed_over:  # what comes next may be for them
                heappush(order, place)
            passed_over.clear()
        if admitting and self.rules.eta == 0:
            self._lease_shares(fed)

    def _not_paused(self, fed: list[Member]) -> list[Member]:
        """Without the paused generators, unless all that live are paused."""
        trusted = [member for member in fed if not self.failures.is_paused(member.name)]
        return trusted if len(trusted) == len(fed) or self.state.others_than(set()) else fed

    def _by_load(self, fed: list[Member]) -> list[Place]:
        """Those with room for the smallest group that waits, as a heap: the least loaded first."""
        least = self._least_group()
        order = [_place(member) for member in fed if self._fits(member, least)]
        heapify(order)
        return order

    def _fits(self, member: Member, n_samples: int) -> bool:
        """A group needs room for all its samples, or a generator with nothing else to do."""
        if (member.load or member.unscored) and self.failures.is_on_probation(member.name):
            return False
        return member.room >= n_samples or (member.load == 0 and member.room > 0)

    def _least_group(self) -> int:
        """No group that waits has fewer samples to make."""
        evaluation, n_samples = self.evaluations.open, self.rules.least_samples
        if len(self.ledger.queued):
            return 1
        return min(n_samples, evaluation.n_samples) if evaluation is not None else n_samples

    def _has_work(self, admitting: bool) -> bool:
        if self.evaluations.open is not None and self.evaluations.open.waiting:
            return True
        return admitting and (len(self.ledger.queued) > 0 or (self.gate.free > 0 and not self.rows.is_exhausted))

    def _lease_one(self, member: Member, *, admitting: bool) -> bool:
        """One group for this member, if there is one that it may have."""
        evaluation = self.evaluations.open
        if evaluation is not None and evaluation.waiting and self._has_share(member, evaluation):
            uid = evaluation.first_of(lambda failed_at: self.state.may_sample(member, failed_at))
            if uid is not None:
                return self._lease_problem(member, evaluation, uid)
        if not admitting or member.version is None:
            return False
        lost = self.ledger.queued.first_of(lambda entry: self.state.may_sample(member, entry.failed_at))
        if lost is not None:
            return self._lease_again(member, lost)
        if len(self.ledger.queued) and self.failures.is_failing(member.name):
            return False  # others are to catch up with what failed here
        if self.rules.eta == 0 or not self.gate.may_admit(member.version):
            return False
        if not self._fits(member, self.rules.most_samples_at(member.version)):  # which source comes next is not known
            return False
        issue = self.rows.draw()
        if issue is None:
            return False
        self._lease(self._admit(member, member.version, issue), member)
        return True

    def _has_share(self, member: Member, evaluation: Evaluation) -> bool:
        """Whether the evaluation may hold one more problem: in training it has a share of the slots."""
        if self.state.phase is not Phase.TRAINING or self.rules.eta == 0:
            return True
        held = sum(1 for lease in member.leased if lease[0] == evaluation.name)
        return held == 0 or held + evaluation.n_samples <= self.rules.evaluate_share * member.capacity

    def _lease_again(self, member: Member, lost: LedgerEntry) -> bool:
        """Lease a queued prompt again. After two deaths, its generator samples nothing else meanwhile."""
        is_poison = lost.n_deaths >= POISON_THRESHOLD
        fits = member.load == 0 if is_poison else self._fits(member, len(lost.missing))
        if member.version is None or member.version < lost.born or not fits:  # I5: no token is older than born
            return False
        entry = self.ledger.lease(lost.uid, member.name)
        entry.alone = member.alone = is_poison
        self._lease(entry, member)
        return True

    def _lease_shares(self, fed: list[Member]) -> None:
        """eta = 0: lease all prompts that the gate allows at once, prompt uid to generator uid mod n, full or not.

        It waits until every ready generator that is not excluded holds the published version and nothing is being
        sampled or scored. So the batch of each generator never depends on timing (docs/staleness.md).
        """
        there = self.state.with_share(self.members.of(Role.GENERATOR, MemberState.STALE, MemberState.HEALTHY))
        out = {x.name for x in self.state.excluded_generators()}
        out |= {x.name for x in there if self.failures.is_paused(x.name)} - {x.name for x in fed}
        ready = [x for x in there if not x.leaving and x.name not in out]
        is_quiet = self.evaluations.open is None and self.ledger.n_live == len(self.ledger.ready)
        if not (fed and len(fed) == len(ready) and is_quiet and self.gate.may_admit(self.gate.v)):
            return
        issues: list[IssuedRow] = []
        while len(issues) < self.gate.free and (issue := self.rows.draw()) is not None:
            issues.append(issue)
        end = self.ledger.next_uid + len(issues)
        for issue in issues:
            member = fed[self.ledger.next_uid % len(fed)]
            entry = self._admit(member, self.gate.v, issue)
            self._lease(entry, member, more=entry.uid + len(fed) < end)

    def _admit(self, member: Member, born: int, issue: IssuedRow) -> LedgerEntry:
        gate = self.gate
        gate.admit(born)
        source = issue.drawn.source
        n_samples = self.rules.samples_at(born, source)
        entry = self.ledger.admit(born=born, n_samples=n_samples, holder=member.name, source=source)
        self.rows.issue(entry.uid, issue)
        self.effects.record(
            Event.ADMIT,
            uid=entry.uid,
            born=entry.born,
            row=issue.drawn.row,
            epoch=issue.drawn.epoch,
            **({"source": issue.drawn.source} if issue.drawn.source else {}),
            **({"row_digest": issue.drawn.digest} if issue.drawn.digest else {}),
            issue=issue.n_before,
            live=gate.live,
            in_training=gate.in_training,
            u=gate.u,
            v=gate.v,
            w=gate.w,
        )
        return entry

    def _lease(self, entry: LedgerEntry, member: Member, *, more: bool = False) -> None:
        samples, row = entry.missing, self.rows.of(entry.uid).drawn.text
        if why := oversize(row):
            self._unsendable.append((entry, why))
            return
        entry.leased_at = self.state.now
        member.leased |= {("", entry.uid, entry.attempt, sample) for sample in samples}
        begun = self._begun(entry, member)
        ids = {"uid": entry.uid, "attempt": entry.attempt, "holder": member.name}
        done = {"n_done": sum(partial.n_sampled for partial in begun)} if begun else {}
        self.effects.record(Event.LEASE, **ids, born=entry.born, n=len(samples), **done)
        for partial in begun:
            self.effects.send(member.name, partial)
        lease = self.state.lease_ids.of("", entry.uid, entry.attempt)
        self.effects.send(member.name, m.Prompt(entry.uid, entry.attempt, entry.born, samples, "", row, more, lease))

    def _begun(self, entry: LedgerEntry, member: Member) -> list[m.Partial]:
        """Partial rollouts of earlier holders; none if the prompt may have killed them."""
        if entry.n_deaths >= POISON_THRESHOLD or member.version is None:
            self.partials.forget(entry.uid, entry.n_samples)
            return []
        return self.partials.hand_on(entry.uid, entry.missing, attempt=entry.attempt, version=member.version)

    def _lease_problem(self, member: Member, evaluation: Evaluation, uid: int) -> bool:
        if not self._fits(member, evaluation.n_samples):
            return False
        evaluation.lease(uid, member.name, self.state.now)
        samples, attempt = evaluation.missing(uid), evaluation.attempts[uid]
        member.leased |= {(evaluation.name, uid, attempt, sample) for sample in samples}
        lease = self.state.lease_ids.of(evaluation.name, uid, attempt)
        row = evaluation.rows[uid]
        prompt = m.Prompt(uid, attempt, evaluation.version, samples, evaluation.name, row, lease=lease)
        self.effects.send(member.name, prompt)
        return True


def _place(member: Member) -> Place:
    return member.load / member.capacity, member.index, member
