"""The head as a state machine: messages and ticks go in, ordered effects come out.

It combines the other modules of this folder into the loop of docs/design.md, and handles membership messages, the
learner's requests, the phases of a run and its end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from areal_bus import messages as m
from areal_bus.authorization import check_sender
from areal_bus.core.batcher import Batcher
from areal_bus.core.data_source import DataCursor
from areal_bus.core.effects import Effect, Effects
from areal_bus.core.evaluation import Evaluation, Examination
from areal_bus.core.events import Event
from areal_bus.core.gate import Gate
from areal_bus.core.head_checkpoint import START, HeadCheckpoint, HeadSavepoint, take
from areal_bus.core.member_lifecycle import MemberLifecycle
from areal_bus.core.membership import Member, Membership, MemberState
from areal_bus.core.publisher import Publisher
from areal_bus.core.refill import Refill
from areal_bus.core.rollouts import Rollouts
from areal_bus.core.scheduler import Scheduler
from areal_bus.core.staleness import StalenessPolicy
from areal_bus.core.state import DataSource, HeadRules, Phase
from areal_bus.core.terms import Terms
from areal_bus.errors import ImpossibleEvent, LateEvent
from areal_bus.messages import Refund, Role

MOST_REFUSED = 4096  # senders and kinds of messages whose refusals are counted
LATE = 2  # a turn that comes after silent_s / LATE is late: the head was not scheduled, or was busy
COUNTS = 8  # a late turn counts as silent_s / COUNTS of silence
ALL_TOLD = 100  # refusals of a sender and kind that have a line each

Handler = Callable[[Member, Any], None]


class Head:
    """`on` for a message, `tick` for the time: both return the effects to carry out, in order."""

    def __init__(
        self,
        rules: HeadRules,
        source: DataSource,
        *,
        now: float,
        life: int = 0,
        term: int = 0,
        frontiers: Mapping[int, HeadCheckpoint] = START,
        waypoints: Iterable[HeadSavepoint] = (),
    ) -> None:
        """A head that comes back (its `life` counts on) begins a new term, at the version of the learner's Begin."""
        self.life = life
        self.rules = rules
        self.phase = Phase.ASSEMBLING
        self.results: dict[str, Evaluation] = {}
        self.figures = dict(frontiers[max(frontiers)].results)  # of evaluations that are over, in earlier lives, too
        self.is_draining = False
        self.max_lag = frontiers[max(frontiers)].max_lag  # of trained tokens that count; None: there are none
        self._effects = Effects()
        self.gate = Gate(batch_size=rules.batch_size, eta=rules.eta, policy=rules.policy)
        self.members = Membership(silent_s=rules.silent_s)
        self.publisher = Publisher(self.gate, self.members, self._effects, timeout_s=rules.push_timeout_s, life=life)
        self.supply = DataCursor(source, max_reissues=rules.max_reissues)
        self.examination = Examination()
        self.rollouts = Rollouts(rules, self.supply, self.gate, self.members, self.examination, self._effects)
        self.scheduler = Scheduler(
            rules,
            self.supply,
            self.gate,
            self.rollouts.ledger,
            self.members,
            self.publisher.pushes,
            self.examination,
            self.rollouts.partials,
            self._effects,
        )
        self.batches = Batcher(rules, self.gate, self.rollouts.ledger, self.supply, self._effects)
        self.refill = Refill(rules, self.rollouts.ledger, self.supply)
        self._began = self._turned = now
        self._n_refused: Counter[tuple[str, str]] = Counter()  # by sender and kind
        self._n_late: Counter[tuple[str, str]] = Counter()  # of those
        self.terms = Terms(term, frontiers, waypoints, every=rules.checkpoint_every, keep=rules.checkpoint_keep)
        self.lifecycle = MemberLifecycle(
            self.members, self.rollouts, self.publisher, self.terms, self._effects, life=life
        )
        self._handlers: dict[type, Handler] = {
            m.Ready: self._on_ready,
            m.Heartbeat: self._on_heartbeat,
            m.Sampled: self.rollouts.sampled,
            m.Partial: self.rollouts.partial,
            m.SampleFailed: self.rollouts.unsampled,
            m.Scored: lambda _, message: self.rollouts.scored(message),
            m.LeaveRequest: lambda member, _: self.lifecycle.leave(member),
            m.BeginTerm: self._on_begin,
            m.Checkpointed: self._on_checkpointed,
            m.BatchRequest: self._on_batch_request,
            m.UpdateDone: self._on_update_done,
            m.Finished: self._on_finished,
            m.Failure: self._on_failure,
            m.PushDone: self.publisher.done,
            m.PushBroken: self.publisher.broken,
        }

    def on(self, sender: str, message: m.Message, now: float) -> list[Effect]:
        """One message from `sender`; what the rules exclude is refused and journalled, never absorbed."""
        self._turn(now)
        try:
            if isinstance(message, m.Join):
                self._on_join(sender, message, now)
            elif isinstance(message, m.Disconnected):
                self.lifecycle.cut(sender)
            elif sender not in self.members.by_name:
                self.lifecycle.answer_stranger(sender, now)
            else:
                member, is_news = self.lifecycle.heard(sender, message, now)
                if isinstance(message, m.Heartbeat) and not is_news:
                    self._on_heartbeat(member, message)
                    return self._effects.take()  # nothing follows from it
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise ImpossibleEvent(f"the head takes no {type(message).__name__}")
                check_sender(member.role, message)
                handler(member, message)
        except ImpossibleEvent as error:
            self._refuse(sender, message, error)
        return self._settle(now)

    def tick(self, now: float, *, until: float | None = None) -> list[Effect]:
        """Time has passed: silences and deadlines. `until`: what came before this is handled (None: all that came)."""
        self._turn(now)
        self.lifecycle.miss(now if until is None else until, now)
        self.publisher.expire(now)
        if self._awaits_a_step:
            self._began = now
        if self.phase is Phase.ASSEMBLING and self.is_draining and now - self._began > self.rules.assemble_s:
            self._end_drained()
        if self.phase is Phase.ASSEMBLING and now - self._began > self.rules.assemble_s:
            awaited = self.members.awaited(self._wanted, self.publisher.errors())
            self._end(1, f"the ring must be complete within {self.rules.assemble_s:g} s; {awaited}")
        return self._settle(now)

    def _turn(self, now: float) -> None:
        """Before anything else: the time in which the head itself stood still is nobody's silence, but for a little.

        So a head that is always late finds who is dead, too.
        """
        gap_s, self._turned = now - self._turned, now
        if gap_s > self.rules.silent_s / LATE:
            self.members.slept(gap_s - self.rules.silent_s / COUNTS, now)

    def drain(self, now: float) -> list[Effect]:
        """End soon, so that a later start goes on from here: the update under way is finished and checkpointed."""
        if not self.is_draining and self.phase is not Phase.STOPPING:
            self.is_draining = True
            self._effects.progress("note", name="head", text="drains: a checkpoint after this update, then the end")
            if self.phase is Phase.BEFORE:
                self._end_drained()
        return self._settle(now)

    def _drain_early(self) -> None:
        """Before the ring is complete. A learner that has outlived a head first writes down what it has."""
        if self.life and self.terms.begun_by is not None and self.gate.u:
            self._enter(Phase.CLOSING)
            self._capture()
        elif self.terms.begun_by is not None or not (self.life and self.terms.may_be_outlived):
            self._end_drained()

    def _end_drained(self) -> None:
        self._end(0, f"drained at version {self.version}" if self.version else "drained before the first step")

    def requeue(self, name: str, now: float) -> list[Effect]:
        """What this member holds goes to others: it counts as dead until it is heard, and is then STALE (I7)."""
        member = self.members.by_name.get(name)
        if member is not None and member.can_be_lost:
            self.members.mark_dead(member)
            self.lifecycle.lose(member, "it stands still", died=False)
        return self._settle(now)

    # members

    def _on_join(self, sender: str, message: m.Join, now: float) -> None:
        if self.phase is Phase.STOPPING:
            self._effects.send(sender, m.Stop("the job is over"))
            raise ImpossibleEvent("nobody joins a job that is over")
        self.lifecycle.join(sender, message, now)

    @property
    def _awaits_a_step(self) -> bool:
        """A learner has outlived a head, and says where it is once its step is done, however long that takes."""
        learners = self.members.of(Role.LEARNER, MemberState.JOINING) if self.phase is Phase.ASSEMBLING else []
        return any(learner.again for learner in learners)

    @property
    def version(self) -> int:
        """Where the run is: before a learner has begun, where the newest frontier says that it was."""
        return max(self.gate.u, *self.terms.frontiers)

    @property
    def finished(self) -> dict[int, m.Finished]:
        """Learner rank -> what it wrote, at the end."""
        return self.terms.finished

    @property
    def asking(self) -> frozenset[int]:
        """Learner ranks that wait for the next batch."""
        return frozenset(self.terms.requests)

    def _on_ready(self, member: Member, message: m.Ready) -> None:
        if member.ready:
            return
        self.members.ready(member.name, message.capacity)
        self._effects.record(Event.MEMBER, name=member.name, state=str(member.standing), why="ready")

    def _on_heartbeat(self, member: Member, message: m.Heartbeat) -> None:
        if member.note != message.note and self.phase is Phase.ASSEMBLING:
            self._effects.progress("note", name=member.name, text=message.note)
        member.progress, member.note = message.progress, message.note

    @property
    def _wanted(self) -> dict[Role, int]:
        rules = self.rules
        return {Role.LEARNER: rules.n_learners, Role.REWARD: rules.n_rewards, Role.GENERATOR: rules.n_generators}

    # the learner

    def _on_begin(self, member: Member, message: m.BeginTerm) -> None:
        """Learner 0 holds the weights of a checkpoint, or of the model: everything goes on from there."""
        if member.role is not Role.LEARNER or member.index != 0:
            raise ImpossibleEvent(f"learner 0 begins a term; got one of {member.name}")
        if member.name == self.terms.begun_by:
            raise ImpossibleEvent(f"a learner begins once; {member.name} has begun term {self.terms.term}")
        self._check_life(message)
        if self.phase is Phase.STOPPING:
            return
        outlived = member.name if message.lives_on else None
        frontier = self.terms.begin(message.version, outlived=outlived, sealed=message.sealed)
        if frontier is None and message.lives_on:
            self._send_back(member, message.version)
            return
        if frontier is None:
            self._end(1, f"{member.name} begins at version {message.version}, whose frontier is not there")
            return
        term = self.terms.term
        kept = self.rollouts.begin_term(term, frontier)
        self.refill.restart()
        self._effects.discard(self.terms.later_than(message.version))
        self.publisher.restart(term, message.version, message.digest, root=member.name)
        self.terms.begun_by = member.name
        self.figures = dict(frontier.results)
        self.max_lag = largest(frontier.max_lag, message.max_lag if message.lives_on else None)
        self._effects.record(
            Event.TERM,
            term=term,
            version=message.version,
            next_uid=frontier.next_uid,
            position=frontier.position,
            open=list(kept),
            kept=list(kept.values()),
            lives_on=message.lives_on,
        )
        self._mark(message.version, member.name)
        is_kept = message.version in message.sealed or self.terms.is_due(message.version)
        if message.lives_on and is_kept and message.version not in self.terms.frontiers:
            self._capture()  # its checkpoint is there, or is being written
        for generator in self.members.of(Role.GENERATOR):
            self._effects.send(generator.name, m.Term(term, message.version))
        self._go_back(message.version, lives_on=message.lives_on)

    def _check_life(self, message: m.BeginTerm | m.BatchRequest) -> None:
        """What was said to a head that is no more is no word to this one."""
        if message.life != self.life:
            raise ImpossibleEvent(f"this head has life {self.life}; this was said to one of life {message.life}")

    def _send_back(self, member: Member, version: int) -> None:
        """A learner has outlived a head, and where it is nobody knows here: it goes back to its checkpoint."""
        why = f"no waypoint on disk says what {member.name} had at version {version}"
        self._effects.progress("warning", text=f"{why}: back to the last checkpoint")
        self._effects.send(member.name, m.Rejoin(why, self.life, anew=True))

    def _mark(self, version: int, root: str) -> None:
        """What a head that comes back needs, should learner 0, `root`, live on at this version."""
        frontier = take(version, self.rollouts.ledger, self.supply, self.figures, self.max_lag, verdicts=False)
        waypoint = HeadSavepoint(root, frontier)
        self.terms.mark(waypoint)
        self._effects.mark(waypoint)

    def _go_back(self, version: int, *, lives_on: bool) -> None:
        """To the phase that a term at `version` begins in."""
        if version:
            how = ", which the learner has: it has outlived the head before" if lives_on else ""
            self._effects.progress("note", name="head", text=f"term {self.terms.term} begins at version {version}{how}")
        if self.phase is not Phase.ASSEMBLING:
            self._begin_phases()

    def _begin_phases(self) -> None:
        """The ring is complete: evaluate what has not been, then train."""
        wanted = self.rules.evaluate_before and "before" not in self.figures and self.gate.u == 0
        self._enter(Phase.BEFORE, evaluation="before" if wanted else None)

    def _on_checkpointed(self, member: Member, message: m.Checkpointed) -> None:
        if member.role is not Role.LEARNER or member.index != 0:
            raise ImpossibleEvent(f"learner 0 writes checkpoints; got one of {member.name}")
        if member.name != self.terms.begun_by or message.version > self.gate.u:
            raise ImpossibleEvent(f"{self.gate.u} updates are finished; {member.name} has one of {message.version}")
        self.terms.checkpointed(message.version)

    def _capture(self) -> None:
        """What a term that began at this version would need."""
        frontier = take(self.gate.u, self.rollouts.ledger, self.supply, self.figures, self.max_lag)
        self.terms.frontiers[frontier.version] = frontier
        self._effects.save(frontier)

    def _on_batch_request(self, member: Member, message: m.BatchRequest) -> None:
        self._check_life(message)
        if self.terms.begun_by is not None and message.step != self.gate.w:
            raise ImpossibleEvent(f"batch {self.gate.w} is next; {member.name} asks for {message.step}")
        self.terms.requests[member.index] = message.step  # before rank 0's Begin, perhaps

    def _on_update_done(self, member: Member, message: m.UpdateDone) -> None:
        if member.index != 0:
            raise ImpossibleEvent(f"learner 0 finishes updates; got one of {member.name}")
        if member.name != self.terms.begun_by:
            raise ImpossibleEvent(f"a learner begins before it updates; {member.name} has not")
        self.gate.finish_update(message.version)
        self.rollouts.ledger.trained(message.version - 1)
        if (lag := message.stats.get("lag_max")) is not None:
            self.max_lag = largest(self.max_lag, int(lag))
        clock = {"version": message.version, "u": self.gate.u}
        self._effects.record(Event.UPDATE, **clock, digest=message.digest, **message.stats)
        self._effects.progress("step", version=message.version, v=self.gate.v, **message.stats)
        self.publisher.snapshot(message.version, message.digest)
        self._effects.discard(self.terms.updated())
        if message.kept or self.terms.is_due(message.version):
            self._capture()

    def _on_finished(self, member: Member, message: m.Finished) -> None:
        if self.gate.w < self.rules.total_steps and self.phase not in (Phase.CLOSING, Phase.AFTER):
            raise ImpossibleEvent(f"a learner finishes after the last batch; {member.name} has after {self.gate.w}")
        self.terms.finished[member.index] = message

    def _on_failure(self, member: Member, message: m.Failure) -> None:
        """Its supervisor ends the job and names it; here it is only written down."""
        self._effects.record(Event.FAILED, name=member.name, error=message.error[:500])

    # what follows from the state, whatever happened

    def _settle(self, now: float) -> list[Effect]:
        """Do everything that the rules now allow, and hand over the effects."""
        if self.phase is not Phase.STOPPING:
            self.publisher.close(now)
            hopeless = self.lifecycle.dismiss(self.rules.n_generators) if self.publisher.pushes.quarantined else None
            if hopeless is None:
                self.publisher.begin(now)
            else:
                self._end(1, hopeless)
            self._advance()
            self._drop_too_old()
            self._refill()
            if self.phase is not Phase.ASSEMBLING:
                admitting = self.phase in (Phase.BEFORE, Phase.TRAINING) and not self.is_draining
                self.scheduler.lease_all(admitting=admitting)
            self.lifecycle.let_go()
            self._serve_requests()
            self._give_up_on_refunds()
        return self._effects.take()

    def _advance(self) -> None:
        """From phase to phase."""
        if self.phase is Phase.TRAINING and not self.is_draining and not self._is_trained():
            return  # most of the time
        if self.phase is Phase.ASSEMBLING and self.is_draining:
            self._drain_early()
        if self.phase is Phase.ASSEMBLING and not self.is_draining and self._is_complete():
            self._begin_phases()
        if self.phase is Phase.BEFORE and self._evaluation_is_over():
            self._enter(Phase.TRAINING)
        if self.phase is Phase.TRAINING and self._is_trained():
            self._enter(Phase.CLOSING)
            self._capture()  # what is open stays open for a run that is extended
            self.rollouts.refund_all(Refund.END_OF_DATA if self.supply.is_exhausted else Refund.END_OF_RUN)
        if self.phase is Phase.TRAINING and self.is_draining and self.gate.u == self.gate.w and self.terms.begun_by:
            self._enter(Phase.CLOSING)
            self._capture()  # what is open stays open
        has_finished = len(self.terms.finished) == self.rules.n_learners
        if self.is_draining and self.phase in (Phase.CLOSING, Phase.AFTER) and has_finished:
            self._end(0, f"drained at version {self.gate.u}")
        if self.phase is Phase.CLOSING and self.gate.v == self.gate.u and self._may_evaluate():
            self._enter(Phase.AFTER, evaluation="after" if self.rules.evaluate_after and not self.is_draining else None)
        if self.phase is Phase.AFTER and self._evaluation_is_over() and has_finished:
            self._end(0, "done")

    def _enter(self, phase: Phase, *, evaluation: str | None = None) -> None:
        self.phase = phase
        self._effects.progress("phase", phase=str(phase))
        if evaluation is not None:
            self._open_evaluation(evaluation)

    def _open_evaluation(self, name: str) -> None:
        """Of the published version."""
        rules = self.rules
        first = self.terms.term * m.ATTEMPTS
        self.examination.open = Evaluation(
            name, self.gate.v, rules.evaluate_samples, list(rules.problems), first_attempt=first
        )

    def _is_complete(self) -> bool:
        """All learners, and one of each other kind.

        When eta is 0 all generators, since shares are fixed, but those that no share waits for either.
        """
        rules, fed = self.rules, len(self.scheduler.fed())
        left_out = [x for x in self.scheduler.left_out() if x.index < rules.n_generators]
        return (
            fed >= (max(1, rules.n_generators - len(left_out)) if rules.eta == 0 else 1)
            and bool(self.members.of(Role.REWARD, MemberState.HEALTHY))
            and len(self.members.of(Role.LEARNER, MemberState.HEALTHY)) == self.rules.n_learners
        )

    def _is_trained(self) -> bool:
        if self.gate.u >= self.rules.total_steps:
            return True
        return self.supply.is_exhausted and self.gate.u == self.gate.w and not self.rollouts.ledger.n_live

    def _may_evaluate(self) -> bool:
        """Somebody holds the last version, or nobody need."""
        return not self.rules.evaluate_after or bool(self.scheduler.fed())

    def _evaluation_is_over(self) -> bool:
        evaluation = self.examination.close()
        if evaluation is not None:
            for _, scored in sorted(evaluation.scored.items()):
                self._effects.keep(scored, step=None, clock=evaluation.version, n_masked=0)
            self.results[evaluation.name] = evaluation
            figures = self.figures[evaluation.name] = evaluation.figures()
            self._effects.record(Event.EVALUATION, **figures)
            self._effects.progress("evaluation", **figures)
            if evaluation.name == "before":
                self._remember_figures()
        return self.examination.open is None

    def _remember_figures(self) -> None:
        """A term that begins here once more begins as this one did, and need not evaluate again."""
        frontier = replace(self.terms.frontiers[self.gate.u], results=dict(self.figures))
        self.terms.frontiers[frontier.version] = frontier
        self._effects.save(frontier)

    @property
    def _wants_batch(self) -> bool:
        """Every learner rank waits for the next batch, and no update is under way."""
        gate, steps = self.gate, self.terms.requests
        if not steps or gate.w != gate.u or self.phase is not Phase.TRAINING:
            return False
        return len(steps) == self.rules.n_learners and all(step == gate.w for step in steps.values())

    def _drop_too_old(self) -> None:
        """Groups that would now be taken and are too old leave first; their rows are leased again at once."""
        while self.rules.policy is StalenessPolicy.DROP and self._wants_batch and (entry := self.batches.too_old()):
            self.rollouts.refund(entry, Refund.TOO_OLD)

    def _refill(self) -> None:
        """Groups without signal leave, and new prompts take their place."""
        while self.phase is Phase.TRAINING and not self.is_draining and (entry := self.refill.next()):
            self.rollouts.refund(entry, Refund.NO_SIGNAL)

    def _serve_requests(self) -> None:
        """A batch for the learner that waits, or the news that there is none."""
        root = self.terms.begun_by
        if not self.terms.requests or root is None:
            return
        learners = self.members.of(Role.LEARNER, MemberState.HEALTHY)
        if self._wants_batch and len(learners) == self.rules.n_learners:
            if self.batches.is_at_the_end and self.rules.drop_last and not self._fills_a_batch:
                self.rollouts.refund_all(Refund.END_OF_DATA)
            n_groups = self.batches.n_next()
            if n_groups:
                batch = self.batches.take(n_groups)
                self.refill.restart()
                self._mark(batch.step + 1, root)
                self.batches.hand_out(batch, learners)
                self.terms.hand_out()
        elif self.phase in (Phase.CLOSING, Phase.AFTER) and len(self.terms.requests) == self.rules.n_learners:
            for learner in learners:  # all of them hear the same
                self._effects.send(learner.name, m.NoBatch(self.gate.w, self.is_draining))
            self.terms.requests.clear()

    @property
    def _fills_a_batch(self) -> bool:
        return len(self.rollouts.ledger.ready) >= self.rules.batch_size

    def _give_up_on_refunds(self) -> None:
        """No spin when nothing can be trained (I11)."""
        limit = max(3 * self.rules.batch_size, 16)
        if self.rollouts.refunds_in_a_row >= limit:
            self._end(1, f"{limit} prompts in a row ended without a reward; the last one: {self.rollouts.last_error}")

    def _end(self, code: int, sentence: str) -> None:
        if self.phase is Phase.STOPPING:
            return
        self._enter(Phase.STOPPING)
        for line in self.lifecycle.deaths.rest():
            self._effects.progress("warning", text=line)
        if text := self.rollouts.failures.summary():
            self._effects.progress("warning", text=text)
        for member in self.members.alive():
            self._effects.send(member.name, m.Stop(sentence))
        self._effects.end(code, sentence)

    def _refuse(self, sender: str, message: m.Message, error: ImpossibleEvent) -> None:
        """Every verdict is accounted for; of anything else a sender's first lines, then the 128th, 256th, 512th, ...

        People are told of what should not have been sent, not of what only came late.
        """
        what, why = type(message).__name__, str(error)
        if len(self._n_refused) > MOST_REFUSED:
            self._n_refused.clear()
            self._n_late.clear()
        self._n_refused[sender, what] += 1
        self._n_late[sender, what] += isinstance(error, LateEvent)
        n = self._n_refused[sender, what]
        n_wrong = n - self._n_late[sender, what]
        is_news = not isinstance(error, LateEvent) and n_wrong.bit_count() == 1
        if sender in self.members.by_name and isinstance(error, LateEvent):
            self._effects.progress("late", text=f"refused {what} of {sender}: {why}")
        elif sender in self.members.by_name and is_news:
            self._effects.progress("note", name="head", text=f"refused {what} of {sender} ({n_wrong} so far): {why}")
        if n <= ALL_TOLD or n.bit_count() == 1 or is_news or isinstance(message, m.Scored):
            ids = {name: getattr(message, name) for name in ("uid", "sample", "attempt") if hasattr(message, name)}
            self._effects.record(Event.REFUSED, what=what, sender=sender, why=why, n=n, **ids)


def largest(*lags: int | None) -> int | None:
    """Of those that there are."""
    return max((lag for lag in lags if lag is not None), default=None)
