"""The way of a prompt to its group's last verdict: drawn, admitted, leased, scored or refunded; knows no batch.

Work goes to the least loaded generator that holds what is published (I7): problems of an evaluation first, then prompts
whose lease was lost, then new ones as the gate allows (I1).
"""

from areal_bus import messages as m
from areal_bus.batches import check_spans, ids
from areal_bus.effects import Effects
from areal_bus.errors import ImpossibleEvent
from areal_bus.evaluation import Evaluation
from areal_bus.gate import Gate
from areal_bus.journal import Event
from areal_bus.ledger import Entry, Ledger, State
from areal_bus.membership import Member, Membership, Standing
from areal_bus.messages import Refund, Role, Scored, VerdictStatus
from areal_bus.rules import HeadRules
from areal_bus.supply import Issue, Supply

EXPECTED = (Refund.END_OF_DATA, Refund.END_OF_RUN, Refund.TOO_OLD)  # no sign that something is wrong


class Rollouts:
    """Owns the ledger, the supply of rows and the open evaluation; spends and returns the gate's credits."""

    def __init__(self, rules: HeadRules, supply: Supply, gate: Gate, members: Membership, effects: Effects) -> None:
        self.rules = rules
        self.supply = supply
        self.gate = gate
        self.members = members
        self.effects = effects
        self.ledger = Ledger()
        self.evaluation: Evaluation | None = None
        self.refunds_in_a_row = 0  # without a group that became complete in between
        self._n_complaints = 0
        self.last_error = ""

    # events

    def lose(self, name: str) -> None:
        """What a lost member held waits for others."""
        self.ledger.lose(name)
        if self.evaluation is not None:
            self.evaluation.lose(name)

    def sampled(self, member: Member, message: m.Sampled) -> None:
        """A slot is free; the sample itself comes by way of a reward, perhaps sooner than this note."""
        member.leased.discard((message.evaluation, message.uid, message.attempt, message.sample))
        entry = None if message.evaluation else self.ledger.open.get(message.uid)
        if entry is not None and entry.state is State.LEASED and message.sample not in entry.sampled:
            self.ledger.sampled(message.uid, message.sample, message.attempt)
        self.effects.record(Event.SAMPLED, **ids(message), n_tokens=message.n_tokens)

    def unsampled(self, member: Member, message: m.Unsampled) -> None:
        """A generator cannot make this group."""
        if message.evaluation:
            self._open(message.evaluation).fail(message.uid, message.attempt, message.error)
            member.release(message.evaluation, message.uid)
            return
        entry = self.ledger.open.get(message.uid)
        if entry is None or entry.attempt != message.attempt or entry.holder != member.name:
            raise ImpossibleEvent(f"{member.name} does not hold prompt {message.uid} at attempt {message.attempt}")
        self.refund(entry, Refund(message.reason), message.error)

    def scored(self, message: Scored) -> None:
        """A verdict. The generator may forget the trajectory whatever becomes of it, and its slot is free."""
        maker = self.members.by_name.get(message.generator)
        if maker is not None:
            maker.leased.discard((message.evaluation, message.uid, message.attempt, message.sample))
            ack = m.Ack(message.uid, message.sample, message.attempt, message.evaluation)
            self.effects.send(message.generator, ack)
        if message.evaluation:
            self._open(message.evaluation).deliver(message)
            self._record_scored(message)
            return
        self._check(message)
        entry = self.ledger.deliver(message)
        self._record_scored(message)
        if message.status != VerdictStatus.VALUE:  # I10
            timed_out = message.status == VerdictStatus.TIMEOUT
            self.refund(entry, Refund.REWARD_TIMEOUT if timed_out else Refund.REWARD_ERROR, message.error)
        elif not entry.missing:
            self.refunds_in_a_row = 0
            self.effects.record(Event.READY, uid=entry.uid)

    def _check(self, message: Scored) -> None:
        """A sample that contradicts itself ends its group, which nobody else would: its generator has forgotten it."""
        entry = self.ledger.open.get(message.uid)
        is_awaited = entry is not None and entry.attempt == message.attempt and message.sample in entry.missing
        if entry is None or not is_awaited or entry.state not in (State.LEASED, State.SCORING):
            return  # the ledger says why
        try:
            check_spans(message, born=entry.born, clock=self.gate.u)
        except ImpossibleEvent as error:
            self.refund(entry, Refund.SAMPLING_ERROR, str(error))
            raise

    def refund(self, entry: Entry, reason: Refund, error: str = "") -> None:
        """The prompt leaves untrained: its credit is back, its sampling stops, and a row too old is issued again."""
        is_under_way = entry.state in (State.LEASED, State.SCORING)
        holder = self.members.by_name.get(entry.holder or "") if is_under_way else None
        self.ledger.refund(entry.uid, reason)
        self.gate.refund(entry.born)
        issue = self.supply.close(entry.uid)
        again = reason is Refund.TOO_OLD and self.supply.again(issue)
        self.effects.record(
            Event.REFUND,
            uid=entry.uid,
            reason=str(reason),
            n_tokens_dropped=sum(scored.n_sampled for scored in entry.scored.values()),
            n_scored=len(entry.scored),
            age=self.gate.u - entry.born,
            again=again,
            error=error[:500],
        )
        if holder is not None:
            holder.release("", entry.uid)
            self.effects.send(holder.name, m.Cancel(entry.uid, entry.attempt))
        if reason not in EXPECTED:
            self._complain(entry, f"{reason}: {error}" if error else str(reason))

    def _complain(self, entry: Entry, why: str) -> None:
        """Rewards need not score the rest of the group; people hear of the 1st, 2nd, 4th, 8th ... such refund."""
        for reward in self.members.of(Role.REWARD, Standing.HEALTHY):
            self.effects.send(reward.name, m.Cancel(entry.uid, entry.attempt))
        self.last_error = why
        self.refunds_in_a_row += 1
        self._n_complaints += 1
        if self._n_complaints.bit_count() == 1:
            times = f" ({self._n_complaints} prompts so far)" if self._n_complaints > 1 else ""
            self.effects.progress("warning", text=f"prompt {entry.uid} ended untrained, {why}{times}")

    def refund_all(self, reason: Refund) -> None:
        """Nothing that lives now will be trained."""
        for entry in self.ledger.live():
            self.refund(entry, reason)

    # leases

    def fed(self) -> list[Member]:
        """Generators that may get work: they hold what is published, or newer (I7)."""
        healthy = self.members.of(Role.GENERATOR, Standing.HEALTHY)
        return [x for x in healthy if x.version is not None and x.version >= self.gate.v]

    def lease_all(self, *, admitting: bool) -> None:
        """Give work to the least loaded while there is work, leave and room; at eta = 0 the whole batch in shares."""
        if not self._has_work(admitting):
            return
        fed = self.fed()
        while any(self._lease_one(member, admitting=admitting) for member in _least_loaded(fed)):
            pass
        if admitting and self.rules.eta == 0:
            self._lease_shares(fed)

    def _has_work(self, admitting: bool) -> bool:
        if self.evaluation is not None and self.evaluation.waiting:
            return True
        return admitting and (len(self.ledger.queued) > 0 or (self.gate.free > 0 and not self.supply.is_exhausted))

    def _lease_one(self, member: Member, *, admitting: bool) -> bool:
        """One group for this member, if there is one that it may have."""
        if self.evaluation is not None and self.evaluation.waiting:
            return self._lease_problem(member, self.evaluation)
        if not admitting or member.version is None:
            return False
        lost = self.ledger.queued.first()
        if lost is not None:
            if member.version < lost.born or not _fits(member, len(lost.missing)):  # I5: no token is older than born
                return False
            self._lease(self.ledger.lease(lost.uid, member.name), member)
            return True
        if self.rules.eta == 0 or not self.gate.may_admit(member.version) or not _fits(member, self.rules.n_samples):
            return False
        issue = self.supply.draw()
        if issue is None:
            return False
        self._lease(self._admit(member, member.version, issue), member)
        return True

    def _lease_shares(self, fed: list[Member]) -> None:
        """eta = 0: all that the gate allows at once, prompt uid to the generator at uid mod n, whatever room it has.

        Only when every generator that is ready holds what is published and nothing is being sampled or scored: so who
        samples what, and what is decoded beside it, never depends on time (docs/staleness.md).
        """
        ready = self.members.of(Role.GENERATOR, Standing.STALE, Standing.HEALTHY)
        is_quiet = self.evaluation is None and self.ledger.n_live == len(self.ledger.ready)
        if not (fed and len(fed) == len(ready) and is_quiet and self.gate.may_admit(self.gate.v)):
            return
        issues: list[Issue] = []
        while len(issues) < self.gate.free and (issue := self.supply.draw()) is not None:
            issues.append(issue)
        end = self.ledger.next_uid + len(issues)
        for issue in issues:
            member = fed[self.ledger.next_uid % len(fed)]
            entry = self._admit(member, self.gate.v, issue)
            self._lease(entry, member, more=entry.uid + len(fed) < end)

    def _admit(self, member: Member, born: int, issue: Issue) -> Entry:
        gate = self.gate
        gate.admit(born)
        entry = self.ledger.admit(born=born, n_samples=self.rules.n_samples, holder=member.name)
        self.supply.issue(entry.uid, issue)
        self.effects.record(
            Event.ADMIT,
            uid=entry.uid,
            born=entry.born,
            row=issue.drawn.row,
            epoch=issue.drawn.epoch,
            issue=issue.n_before,
            live=gate.live,
            in_training=gate.in_training,
            u=gate.u,
            v=gate.v,
            w=gate.w,
        )
        return entry

    def _lease(self, entry: Entry, member: Member, *, more: bool = False) -> None:
        samples = entry.missing
        member.leased |= {("", entry.uid, entry.attempt, sample) for sample in samples}
        self.effects.record(
            Event.LEASE, uid=entry.uid, attempt=entry.attempt, holder=member.name, born=entry.born, n=len(samples)
        )
        row = self.supply.of(entry.uid).drawn.text
        self.effects.send(member.name, m.Prompt(entry.uid, entry.attempt, entry.born, samples, "", row, more))

    def _lease_problem(self, member: Member, evaluation: Evaluation) -> bool:
        if not _fits(member, evaluation.n_samples):
            return False
        uid = evaluation.lease(member.name)
        samples, attempt = evaluation.missing(uid), evaluation.attempts[uid]
        member.leased |= {(evaluation.name, uid, attempt, sample) for sample in samples}
        prompt = m.Prompt(uid, attempt, evaluation.version, samples, evaluation.name, evaluation.rows[uid])
        self.effects.send(member.name, prompt)
        return True

    # evaluation

    def evaluate(self, name: str) -> None:
        """Open an evaluation of the published version."""
        rules = self.rules
        self.evaluation = Evaluation(name, self.gate.v, rules.evaluate_samples, list(rules.problems))

    def close_evaluation(self) -> Evaluation | None:
        """The evaluation when its last verdict is in, else None."""
        evaluation = self.evaluation
        if evaluation is None or not evaluation.is_over:
            return None
        self.evaluation = None
        for _, scored in sorted(evaluation.scored.items()):
            self.effects.keep(scored, step=None, clock=evaluation.version, n_masked=0)
        return evaluation

    def _open(self, name: str) -> Evaluation:
        if self.evaluation is None or self.evaluation.name != name:
            raise ImpossibleEvent(f"evaluation {name!r} is not open")
        return self.evaluation

    # the journal

    def _record_scored(self, scored: Scored) -> None:
        versions = [version for version, _ in scored.spans]
        self.effects.record(
            Event.SCORED,
            **ids(scored),
            status=scored.status,
            reward=scored.reward,
            correct=scored.correct,
            n_tokens=scored.n_sampled,
            finish=scored.finish,
            min_version=min(versions, default=None),
            max_version=max(versions, default=None),
            seconds=round(scored.seconds, 4),
        )


def _least_loaded(fed: list[Member]) -> list[Member]:
    """Those with room, the least loaded first."""
    return sorted((x for x in fed if x.room > 0), key=lambda x: (x.load / x.capacity, x.index))


def _fits(member: Member, n_samples: int) -> bool:
    """A group needs room for all its samples, or a generator with nothing else to do."""
    return member.room >= n_samples or member.load == 0
