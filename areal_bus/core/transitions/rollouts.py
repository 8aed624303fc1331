"""Handles leased prompts: sampled, scored, lost, refunded, or carried into a new term."""

from collections.abc import Iterable
from dataclasses import replace

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.evaluation import Evaluation
from areal_bus.core.events import Event
from areal_bus.core.members.lease_failures import actor_of
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, newest, revive
from areal_bus.core.parts.ledger import LedgerEntry, PromptState
from areal_bus.core.parts.partial_rollouts import check_whole
from areal_bus.core.parts.reward_parts import as_fields, broken_roles, parts_of
from areal_bus.core.state import HeadState
from areal_bus.core.transitions.batcher import check_spans, ids
from areal_bus.core.transitions.scheduler import POISON_THRESHOLD
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Partial, Refund, Role, Scored, VerdictStatus

MOST_TRIES = 3  # generators that may fail at a prompt before it is refunded
EXPECTED = (Refund.END_OF_DATA, Refund.END_OF_RUN, Refund.TOO_OLD, Refund.NO_SIGNAL)  # no sign that something is wrong


class Rollouts:
    """Applies reports of generators and rewards to the ledger and the open evaluation. Returns credits to the gate."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        self.state, self.effects = state, effects
        self.rules, self.gate, self.members, self.rows = state.rules, state.gate, state.members, state.rows
        self.ledger, self.partials, self.evaluations = state.ledger, state.partials, state.evaluations
        self.term = 0
        self._n_complaints = 0
        self._bases: list[tuple[int, int]] = []  # (term, version it began with) of every term of this head

    # terms

    def begin_term(self, term: int, checkpoint: HeadCheckpoint) -> dict[int, list[int]]:
        """Restore `checkpoint`, which may be earlier or later. Returns open prompts, with samples whose verdicts stay.

        Prompts admitted after it are refunded (lost_timeline). The data source draws their rows again.
        """
        known = self.ledger.open
        self.term = term
        self._bases.append((term, checkpoint.version))
        self.gate.restart(checkpoint.version)
        self.ledger.restart(next_uid=checkpoint.next_uid, term=term)
        self.rows.restart(position=checkpoint.position, again=checkpoint.again, state=checkpoint.source)
        self.state.refunds_in_a_row = 0
        self._end_evaluation()
        for prompt in checkpoint.open:
            entry = revive(prompt, known.get(prompt.uid), checkpoint.version, self.rules.reward_of)
            self.gate.admit(entry.born)
            self.rows.issue(entry.uid, prompt.issue)
            self.ledger.reopen(entry)
        self.partials.begin_term(checkpoint.version, set(self.ledger.open))
        self._release(known)
        return {uid: list(entry.verdicts) for uid, entry in self.ledger.open.items()}

    def _release(self, known: dict[int, LedgerEntry]) -> None:
        """Cancel leases that do not exist in the new term."""
        for uid, before in known.items():
            now = self.ledger.open.get(uid)
            was_held = before.state in (PromptState.LEASED, PromptState.SCORING)
            if before.holder is not None and was_held and (now is None or now.holder != before.holder):
                self.end_lease(before.holder, uid, before.attempt)

    def _end_evaluation(self) -> None:
        """Drop the open evaluation and end its leases. The new term begins it again."""
        evaluation, self.evaluations.open = self.evaluations.open, None
        if evaluation is not None:
            for uid, holder in evaluation.leased.items():
                self.end_lease(holder, uid, evaluation.attempts[uid], evaluation.name)

    def drop_evaluation(self) -> None:
        """Drop the open evaluation, because the run drains. The resumed run begins it again."""
        if self.evaluations.open is not None:
            name = self.evaluations.open.name
            self.effects.progress("note", name="head", text=f"drops evaluation {name!r}: a resumed run restarts it")
        self._end_evaluation()

    def end_lease(self, holder: str, uid: int, attempt: int, evaluation: str = "") -> None:
        member = self.members.by_name.get(holder)
        if member is not None:
            self._free(member, evaluation, uid, attempt)
            self.effects.send(holder, m.Cancel(uid, attempt, evaluation))

    @staticmethod
    def _free(member: Member, evaluation: str, uid: int, attempt: int) -> None:
        member.release(evaluation, uid, attempt)
        member.alone = member.alone and bool(member.leased)

    def _is_void(self, scored: Scored | Partial) -> bool:
        """Whether a version that a later term discarded made it."""
        bases = [version for term, version in self._bases if term > scored.term]
        return bool(bases) and newest(scored) > min(bases)

    # events

    def lose(self, name: str, *, died: bool = True) -> None:
        """Queue the prompts of a lost member. Refund a prompt that killed three generators, the last one alone."""
        alone = {entry.uid for entry in self.ledger.open.values() if entry.holder == name and entry.alone}
        for entry in self.ledger.lose(name, died=died):
            if entry.uid in alone and entry.n_deaths > POISON_THRESHOLD:
                why = f"{entry.n_deaths} generators died while they sampled it, the last one had nothing else to do"
                self.refund(entry, Refund.POISON, why)
        if self.evaluations.open is not None:
            self.evaluations.open.lose(name)

    def clear_suspicion(self, uids: Iterable[int]) -> None:
        """A generator that was declared dead while it sampled these prompts is alive: uncount that death."""
        for uid in uids:
            entry = self.ledger.open.get(uid)
            if entry is not None and entry.n_deaths:
                entry.n_deaths -= 1

    def sampled(self, member: Member, message: m.Sampled) -> None:
        """A generator finished a sample: its slot is free. The verdict comes from a reward and may arrive first."""
        self._check_count(message)
        lease = (message.evaluation, message.uid, message.attempt, message.sample)
        self._discard(member, lease)
        if message.evaluation:
            evaluation = self.evaluations.named(message.evaluation)
            evaluation.sampled(member.name, message)
            is_scored = (message.uid, message.sample) in evaluation.scored
        else:
            entry = self.ledger.sampled(member.name, message)
            is_scored = message.sample in entry.scored or message.sample in entry.failed
        if self.state.is_guest(member) and not is_scored:
            member.unscored.add(lease)
        self.effects.record(Event.SAMPLED, **ids(message), n_tokens=message.n_tokens)

    def _check_count(self, message: m.Sampled) -> None:
        """Its lease stays its holder's: the sample itself, where it is judged, ends it."""
        if message.evaluation:
            of = self.evaluations.named(message.evaluation)
            self.rules.check_count(message, of.version, of.set_name, most=of.max_new_tokens)
        elif entry := self.ledger.open.get(message.uid):
            self.rules.check_count(message, entry.born, entry.source)

    def partial(self, member: Member, message: Partial) -> None:
        """Store an unfinished sample's tokens for its next holder; the last holder may offer them."""
        self.state.lease_ids.check(message)
        entry = self.ledger.open.get(message.uid)
        not_held = f"{member.name} does not hold prompt {message.uid} at attempt {message.attempt}"
        if entry is None:
            raise self.ledger.not_open(not_held, message.uid)
        is_held = entry.holder == member.name and _awaits(entry, message)
        if not (is_held or _is_queued(entry, message)):
            raise ImpossibleEvent(not_held)
        if self._is_void(message):
            void = f"tokens of versions that term {self.term} made void"
            raise ImpossibleEvent(f"a partial rollout of term {message.term} has {void}")
        check_whole(message)
        check_spans(message, born=entry.born, clock=self.gate.u)
        self.rules.check_sample(message, entry.born, entry.source, is_guests=self.state.is_guests(member.name))
        self.partials.keep(replace(message, lease=""))

    def unsampled(self, member: Member, message: m.SampleFailed) -> None:
        """A generator cannot sample this group. Its slots are free in any case."""
        self._free(member, message.evaluation, message.uid, message.attempt)
        if message.evaluation:
            evaluation = self.evaluations.named(message.evaluation)
            evaluation.check_holder(member.name, message.uid)
            # a new term leases all problems again, so that a lost timeline is no reason
            self.problem_failed(evaluation, message.uid, message.attempt, message.error)
            return
        entry = self.ledger.open.get(message.uid)
        if entry is None or entry.attempt != message.attempt or entry.holder != member.name:
            raise ImpossibleEvent(f"{member.name} does not hold prompt {message.uid} at attempt {message.attempt}")
        if message.reason != Refund.LOST_TIMELINE:
            self.failed(entry, Refund(message.reason), message.error)
        elif self.ledger.is_of_earlier_term(entry):
            self.ledger.give_back(entry.uid)
        else:
            self.failed(entry, Refund.SAMPLING_ERROR, f"no term began since its lease: {message.error}")

    def failed(self, entry: LedgerEntry, reason: Refund, error: str, *, lasted_s: float = 0.0) -> None:
        """The holder failed at this prompt. Others try it before it is refunded. `lasted_s`: until it timed out."""
        holder = entry.holder or ""
        self.state.lease_failures.failed(holder, error, lasted_s=lasted_s)
        entry.failed_at.add(actor_of(holder))
        if self._is_given_up(entry.failed_at):
            self.refund(entry, reason, error)
            return
        ids = {"uid": entry.uid, "attempt": entry.attempt, "holder": holder}
        self.effects.record(Event.UNSAMPLED, **ids, reason=str(reason), error=error[:500])
        self.partials.forget(entry.uid, entry.n_samples)  # they may be the cause
        self.end_lease(holder, entry.uid, entry.attempt)
        self.ledger.give_back(entry.uid)

    def problem_failed(
        self, evaluation: Evaluation, uid: int, attempt: int, error: str, *, lasted_s: float = 0.0
    ) -> None:
        """As `failed`, of a problem of an evaluation."""
        holder = evaluation.leased.get(uid, "")
        failed_at = evaluation.failed_at.setdefault(uid, set())
        self.state.lease_failures.failed(holder, error, lasted_s=lasted_s)
        failed_at.add(actor_of(holder))
        if self._is_given_up(failed_at):
            evaluation.fail(uid, attempt, error)
        else:
            evaluation.give_back(uid, attempt)

    def _is_given_up(self, failed_at: set[str]) -> bool:
        """Whether nobody else tries this prompt. If several failed, the prompt is the cause."""
        state = self.state
        if len(failed_at) < MOST_TRIES and (state.others_than(failed_at) or state.others_still_load(failed_at)):
            return False
        if len(failed_at) > 1:
            self.state.lease_failures.excuse(failed_at)
        return True

    def _note_lease(self, name: str, leased_at: float) -> None:
        """A lease was completed: those of the job's own generators are the measure for a guest's."""
        maker = self.members.by_name.get(name)
        if maker is not None and not self.state.is_guest(maker):
            self.state.lease_limit.note(self.state.now - leased_at)

    @staticmethod
    def _discard(member: Member, lease: tuple[str, int, int, int]) -> None:
        member.leased.discard(lease)
        member.unscored.discard(lease)
        member.alone = member.alone and bool(member.leased)

    def scored(self, message: Scored) -> None:
        """Record a verdict. In any case the generator may delete the trajectory, and its slot is free."""
        self.state.lease_ids.check(message)
        self._check_term(message)
        if broken := broken_roles(message.roles, parts_of(message)):  # raises, too, before anything depends on them
            raise ImpossibleEvent(broken)
        maker = self.members.by_name.get(message.generator)
        if maker is not None:
            self._discard(maker, (message.evaluation, message.uid, message.attempt, message.sample))
            ack = m.Ack(message.uid, message.sample, message.attempt, message.evaluation)
            self.effects.send(message.generator, ack)
        message = replace(message, lease="")  # what is kept goes to disk, and other samples have the same lease
        if message.evaluation:
            self._answer(self.evaluations.named(message.evaluation), message)
            return
        self._check(message)
        reward = self.rules.reward_of(message.status, message.reward)  # I10
        if reward is None:
            entry = self.ledger.fail(message)
        else:
            message = message if message.status == VerdictStatus.VALUE else replace(message, reward=reward)
            entry = self.ledger.deliver(message)
        self.partials.drop(message.uid, message.sample)
        self._record_scored(message)
        if entry.failed and (entry.is_hopeless or not self.rules.partial_groups):
            timed_out = message.status == VerdictStatus.TIMEOUT
            self.refund(entry, Refund.REWARD_TIMEOUT if timed_out else Refund.REWARD_ERROR, message.error)
        elif not entry.missing:
            if entry.state is PromptState.READY:
                self.ready(entry)
            self._note_lease(message.generator, entry.leased_at)

    def ready(self, entry: LedgerEntry) -> None:
        """The group has its last verdict."""
        self.state.refunds_in_a_row = 0
        missing = {"missing": sorted(entry.failed)} if entry.failed else {}
        self.effects.record(Event.READY, uid=entry.uid, **missing)

    def _answer(self, evaluation: Evaluation, message: Scored) -> None:
        """A sample of an evaluation. An impossible one ends its problem: no copy of it is left."""
        evaluation.check(message)
        try:
            check_spans(message, born=evaluation.version, clock=self.gate.u)
            self.rules.check_sample(
                message,
                evaluation.version,
                evaluation.set_name,
                is_guests=self.state.is_guests(message.generator),
                most=evaluation.max_new_tokens,
            )
        except ImpossibleEvent as error:
            self.problem_failed(evaluation, message.uid, message.attempt, str(error))
            self.end_lease(message.generator, message.uid, message.attempt, evaluation.name)
            raise
        evaluation.deliver(message)
        self._record_scored(message)
        if message.uid not in evaluation.leased:
            self._note_lease(message.generator, evaluation.leased_at[message.uid])

    def _check_term(self, message: Scored) -> None:
        """No sample can be of a later term. One that claims so is rejected without an Ack."""
        if message.term > self.term:
            terms = f"it claims term {message.term}, this is term {self.term}"
            raise ImpossibleEvent(f"a sample cannot be of a later term: {terms}")

    def _check(self, message: Scored) -> None:
        """Check a sample. An inconsistent one ends its group: its generator has no copy left to send again."""
        entry = self.ledger.open.get(message.uid)
        if entry is None or not _awaits(entry, message):
            return  # the ledger says why
        if message.generator != entry.holder:
            raise ImpossibleEvent(f"{entry.holder} holds prompt {entry.uid}; {message.generator} claims a sample of it")
        is_void = self._is_void(message)
        void = f"a sample of term {message.term} has tokens of versions that term {self.term} made void"
        if is_void and self.ledger.is_of_earlier_term(entry):
            self.ledger.give_back(entry.uid)
            self.end_lease(message.generator, entry.uid, entry.attempt)
            raise ImpossibleEvent(void)
        try:
            if is_void:
                raise ImpossibleEvent(void)
            check_spans(message, born=entry.born, clock=self.gate.u)
            is_guests = self.state.is_guests(message.generator)
            self.rules.check_sample(message, entry.born, entry.source, is_guests=is_guests)
        except ImpossibleEvent as error:
            self.failed(entry, Refund.SAMPLING_ERROR, str(error))
            raise

    def refund(self, entry: LedgerEntry, reason: Refund, error: str = "") -> None:
        """Refund a prompt: its credit returns, its sampling stops, and the row of a too old one is issued again."""
        is_under_way = entry.state in (PromptState.LEASED, PromptState.SCORING) and bool(entry.missing)
        holder = self.members.by_name.get(entry.holder or "") if is_under_way else None
        self.ledger.refund(entry.uid, reason)
        self.partials.forget(entry.uid, entry.n_samples)
        self.gate.refund(entry.born)
        if reason is Refund.NO_SIGNAL:
            self.rows.learn(entry.uid, *entry.solved)
        issue = self.rows.close(entry.uid)
        again = reason is Refund.TOO_OLD and self.rows.again(issue)
        self.effects.record(
            Event.REFUND,
            uid=entry.uid,
            reason=str(reason),
            n_tokens_dropped=sum(scored.n_sampled for scored in entry.verdicts.values()),
            n_scored=len(entry.verdicts),
            age=self.gate.u - entry.born,
            again=again,
            error=error[:500],
        )
        if holder is not None:
            self.end_lease(holder.name, entry.uid, entry.attempt)
        is_dropped = reason == Refund.PROMPT_TOO_LONG and self.rules.drop_long_prompts
        if reason not in EXPECTED and not is_dropped:
            self._complain(entry, f"{reason}: {error}" if error else str(reason))

    def _complain(self, entry: LedgerEntry, why: str) -> None:
        """Cancel the scores of the group, and warn at the 1st, 2nd, 4th, 8th ... such refund."""
        for reward in self.members.of(Role.REWARD, MemberState.HEALTHY):
            self.effects.send(reward.name, m.Cancel(entry.uid, entry.attempt))
        self.state.last_refund_error = why
        self.state.refunds_in_a_row += 1
        self._n_complaints += 1
        if self._n_complaints.bit_count() == 1:
            times = f" ({self._n_complaints} prompts so far)" if self._n_complaints > 1 else ""
            self.effects.progress("warning", text=f"prompt {entry.uid} ended untrained, {why}{times}")

    def refund_all(self, reason: Refund) -> None:
        for entry in self.ledger.live():
            self.refund(entry, reason)

    def holds_any(self, name: str) -> bool:
        """Whether the head awaits a sample that this member decodes or keeps until its verdict."""
        states = (PromptState.LEASED, PromptState.SCORING)
        if any(entry.holder == name and entry.state in states for entry in self.ledger.open.values()):
            return True
        return self.evaluations.open is not None and name in self.evaluations.open.leased.values()

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
            **({"roles": scored.roles} if scored.roles else {}),
            **as_fields(parts_of(scored)),
        )
        self.state.lease_failures.succeeded(scored.generator)
        self.state.score_failures.add(scored)
        if text := self.state.score_failures.warning():
            self.effects.progress("warning", text=text)


def _is_queued(entry: LedgerEntry, message: Partial) -> bool:
    """Whether this attempt was the last lease, and the prompt waits for the next."""
    return entry.state is PromptState.QUEUED and entry.attempt == message.attempt and message.sample in entry.missing


def _awaits(entry: LedgerEntry, message: Scored | Partial) -> bool:
    """Whether the sample of this attempt is still awaited."""
    is_held = entry.state in (PromptState.LEASED, PromptState.SCORING)
    return is_held and entry.attempt == message.attempt and message.sample in entry.missing
