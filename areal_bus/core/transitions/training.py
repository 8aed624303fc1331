"""Serves the learner: learner 0 begins terms, ends updates, writes checkpoints; every rank requests each batch."""

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.collapse import CollapseForecast, Rollback
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, HeadSavepoint
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.state import HeadState, Phase
from areal_bus.core.transitions.batcher import Batcher, Refill
from areal_bus.core.transitions.phases import Phases
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.core.transitions.split_changes import SplitChanges
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Refund, Role


class Training:
    """Handles the messages of learner ranks and the requests that wait."""

    def __init__(
        self,
        state: HeadState,
        effects: Effects,
        rollouts: Rollouts,
        publisher: Publisher,
        phases: Phases,
        split_changes: SplitChanges,
    ) -> None:
        self.state, self.effects = state, effects
        self.rules, self.gate, self.terms = state.rules, state.gate, state.terms
        self.rollouts = rollouts
        self.publisher = publisher
        self.phases = phases
        self.split_changes = split_changes
        self.batcher = Batcher(state, effects)
        self.refill = Refill(state)

    # messages of the learner

    def begin_term(self, member: Member, message: m.BeginTerm) -> None:
        """Learner 0 holds the weights of a checkpoint or of the base model: the run continues from there."""
        if member.role is not Role.LEARNER or member.index != 0:
            raise ImpossibleEvent(f"learner 0 begins a term; got one of {member.name}")
        if member.name == self.terms.begun_by:
            raise ImpossibleEvent(f"a learner begins one term; {member.name} has begun term {self.terms.term}")
        self._check_incarnation(message)
        if self.state.phase is Phase.STOPPING:
            return
        self._take_over(message)
        if (order := self.state.rollback) and self.state.is_rolling_back and message.version > order.to:
            self._send_back(member, message, f"a rollback to version {order.to}")
            return
        survivor = member.name if message.lives_on else None
        checkpoint, continues = self._of_copy(message) if message.restored else (None, message.lives_on)
        if checkpoint is not None or not message.restored:
            checkpoint = self.terms.begin(message.version, outlived=survivor, sealed=message.sealed, copied=checkpoint)
        if checkpoint is not None:
            self._begin_term(member, message, checkpoint, continues=continues)
        elif message.lives_on or message.restored:
            self._send_back(member, message, f"missing savepoint of {member.name} at version {message.version}")
        else:
            self.phases.end(1, f"missing head checkpoint of version {message.version}, at which {member.name} begins")

    def _take_over(self, message: m.BeginTerm) -> None:
        """After a change of the split nothing is lost: the term begins with all that the head has now."""
        handed_over, self.state.change.handed_over = self.state.change.handed_over, None
        if handed_over is not None and message.version == handed_over == self.gate.u == self.gate.w:
            self.phases.save_checkpoint()

    def _of_copy(self, message: m.BeginTerm) -> tuple[HeadCheckpoint | None, bool]:
        """The state for a copy of this version, None if there is none; and whether no update is undone.

        A head that lives takes its own state: at u the batch in training is formed again, at w = u + 1 the UpdateDone
        was lost. When the run closes, the head checkpoint of u has the prompts that were open.
        """
        version, gate = message.version, self.gate
        if self.publisher.root is None:  # this head has begun no term
            return self.terms.of_copy(version), self.terms.continues_at(version)
        if self.state.phase in (Phase.CLOSING, Phase.AFTER):
            return self.terms.of_copy(version), False
        if version == gate.u and not self.publisher.is_digest(version, message.digest):
            return None, False
        if version == gate.u or version == gate.w == gate.u + 1:
            return self.state.checkpoint(version, reopens=version == gate.u), True
        return self.terms.of_copy(version), False

    def _begin_term(self, root: Member, message: m.BeginTerm, checkpoint: HeadCheckpoint, *, continues: bool) -> None:
        """`continues`: no update of learner 0 is undone."""
        term, version, state = self.terms.term, message.version, self.state
        kept = self.rollouts.begin_term(term, checkpoint)
        self.refill.restart()
        self.effects.discard(self.terms.later_than(version))
        self.publisher.restart(term, version, message.digest, root=root.name)
        self.terms.begun_by = root.name
        state.is_rolling_back = False
        if not continues or not state.forecast.first:
            state.forecast = CollapseForecast(checkpoint.first)
        state.figures = dict(checkpoint.results)
        state.max_lag = largest(checkpoint.max_lag, message.max_lag if continues else None)
        self.effects.record(
            Event.TERM,
            term=term,
            version=version,
            next_uid=checkpoint.next_uid,
            position=checkpoint.position,
            open=list(kept),
            kept=list(kept.values()),
            lives_on=continues,
            **({"restored": True} if continues and message.restored else {}),
            **self._compared(),
        )
        self.publisher.record_stage(version)
        self._write_savepoint(version, root.name)
        is_kept = message.restored or version in message.sealed or self.terms.is_due(version)
        if continues and is_kept and version not in self.terms.checkpoints:
            self.phases.save_checkpoint()  # the learner's checkpoint is on disk, is being written, or may be next
        for generator in state.members.of(Role.GENERATOR):
            self.effects.send(generator.name, m.Term(term, version))
        self._restart_phases(version, message)

    def _compared(self) -> dict[str, list[int]]:
        """Journal field: the open prompts that keep the verdict of their group."""
        if not self.rules.compares:
            return {}
        return {"compared": [uid for uid, entry in self.state.ledger.open.items() if entry.singles is not None]}

    def _check_incarnation(self, message: m.BeginTerm | m.BatchRequest) -> None:
        """Reject a message that was sent to an earlier incarnation of the head."""
        if message.life != self.state.incarnation:
            heads = f"the learner addressed head {message.life}, this is head {self.state.incarnation}"
            raise ImpossibleEvent(f"incarnation mismatch: {heads}")

    def _send_back(self, member: Member, message: m.BeginTerm, why: str) -> None:
        """No term can begin at the version of this learner (it outlived its head, or its copy it): back to disk."""
        self.effects.progress("warning", text=f"{why}: back to the last checkpoint")
        order = m.Rejoin(why, self.state.incarnation, anew=True, undo=message.restored)
        self.effects.send(member.name, order)

    def _write_savepoint(self, version: int, root: str) -> None:
        """Write what a restarted head needs if learner 0, `root`, survives with this version."""
        savepoint = HeadSavepoint(root, self.state.checkpoint(version, verdicts=False))
        self.terms.mark(savepoint)
        self.effects.mark(savepoint)

    def _restart_phases(self, version: int, message: m.BeginTerm) -> None:
        """Go to the phase in which a term at `version` begins."""
        if version:
            how = ", which the learner holds: it survived the previous head" if message.lives_on else ""
            how = ", from the copy in memory of a learner that died" if message.restored else how
            self.effects.progress("note", name="head", text=f"term {self.terms.term} begins at version {version}{how}")
        if self.state.phase is not Phase.ASSEMBLING:
            self.phases.begin()

    def checkpointed(self, member: Member, message: m.Checkpointed) -> None:
        """Learner 0 has written its part of a checkpoint."""
        if member.role is not Role.LEARNER or member.index != 0:
            raise ImpossibleEvent(f"learner 0 writes checkpoints; got one of {member.name}")
        if member.name != self.terms.begun_by or message.version > self.gate.u:
            what = f"unknown version {message.version}, checkpointed by {member.name}"
            raise ImpossibleEvent(f"{what}: {self.gate.u} updates are finished")
        self.terms.checkpointed(message.version)

    def request(self, member: Member, message: m.BatchRequest) -> None:
        """A learner rank waits for a batch. The request may arrive before learner 0 begins the term."""
        self._check_incarnation(message)
        if self.terms.begun_by is not None and message.step != self.gate.w:
            raise ImpossibleEvent(f"batch {self.gate.w} is next; {member.name} asks for {message.step}")
        self.terms.requests[member.index] = message.step

    def update_done(self, member: Member, message: m.UpdateDone) -> None:
        """An update is finished: its version can be pushed."""
        if member.index != 0:
            raise ImpossibleEvent(f"learner 0 finishes updates; got one of {member.name}")
        if member.name != self.terms.begun_by:
            raise ImpossibleEvent(f"update refused: {member.name} has not begun this term")
        self.gate.finish_update(message.version)
        for entry in self.state.ledger.trained(message.version - 1):
            self.state.rows.close(entry.uid)
        if (lag := message.stats.get("lag_max")) is not None:
            self.state.max_lag = largest(self.state.max_lag, int(lag))
        clock = {"version": message.version, "u": self.gate.u}
        self.effects.record(Event.UPDATE, **clock, digest=message.digest, **message.stats)
        self.effects.progress("step", version=message.version, v=self.gate.v, **message.stats)
        if (why := self.state.forecast.see(message.stats)) and self._undoes(message, why):
            return
        self.publisher.snapshot(message.version, message.digest)
        at = None if self.rules.on_collapse == "warn" else message.version
        self.effects.discard(self.terms.updated(rollback_at=at))
        if message.held:
            self.terms.hold(self.state.checkpoint(self.gate.u))
        if message.kept or self.terms.is_due(message.version):
            self.phases.save_checkpoint()

    def _undoes(self, message: m.UpdateDone, why: str) -> bool:
        """Answer the forecast of a collapse as watch.on_collapse says. Returns whether this update is undone."""
        state, version, good = self.state, message.version, self.terms.good(message.version)
        is_free = state.phase is Phase.TRAINING and not state.is_draining and state.rollback is None
        action = self.rules.on_collapse if is_free else "warn"
        fields = {"version": version, "action": action, "why": why}
        text = f"collapse ahead at version {version}: {why}"
        if action == "stop":
            state.stopped = f"stopped: {text}; the last checkpoint before it is of version {good}"
        if action != "rollback":
            self.effects.record(Event.COLLAPSE, **fields)
            self.effects.progress("warning", text=f"{text} (docs/alarms.md)")
            return False
        lr = state.forecast.smaller_lr(message.stats, version - good)
        state.rollback = Rollback(self.terms.term, version, good, lr, why)
        state.is_rolling_back = True
        self.effects.record(Event.COLLAPSE, **fields, to=good, max_lr=lr)
        text += f"; back to version {good}, from there actor.lr is {lr:.2g} at most"
        self.effects.progress("warning", text=text)
        for learner in state.members.of(Role.LEARNER):
            self.effects.send(learner.name, m.Rejoin(text, state.incarnation, anew=True, undo=True))
        self.terms.break_crew()
        return True

    def finished(self, member: Member, message: m.Finished) -> None:
        """A learner rank has written its last files."""
        is_over = self.state.phase in (Phase.CLOSING, Phase.AFTER)
        if self.gate.w < self.rules.total_steps and not (is_over or self.state.change.is_handing_over):
            raise ImpossibleEvent(f"finish refused: {member.name} ended after batch {self.gate.w}, not the last")
        self.terms.finished[member.index] = message

    # batches

    @property
    def _wants_batch(self) -> bool:
        """Every learner rank waits for the next batch, and no update is in progress."""
        gate, steps = self.gate, self.terms.requests
        if not steps or gate.w != gate.u or self.state.phase is not Phase.TRAINING:
            return False
        if self.state.change.is_handing_over:
            return False  # a repeated request of a learner that writes its checkpoint
        return len(steps) == self.state.split.learners and all(step == gate.w for step in steps.values())

    def drop_too_old(self) -> None:
        """Refund groups that the next batch would take and that are too old; their rows are issued again."""
        while self.rules.policy is StalenessPolicy.DROP and self._wants_batch and (entry := self.batcher.too_old()):
            self.rollouts.refund(entry, Refund.TOO_OLD)

    def replace_groups(self) -> None:
        """Refund groups without signal; new prompts take their place."""
        is_training = self.state.phase is Phase.TRAINING and not self.state.is_draining
        while is_training and (entry := self.refill.next()):
            self.rollouts.refund(entry, Refund.NO_SIGNAL)

    def serve_requests(self) -> None:
        """Send the next batch to the waiting learner ranks, or tell them that there is none."""
        root = self.terms.begun_by
        if not self.terms.requests or root is None:
            return
        learners = self.state.members.of(Role.LEARNER, MemberState.HEALTHY)
        n_learners = self.state.split.learners
        if self._wants_batch and len(learners) == n_learners:
            if self.split_changes.is_due:
                self.split_changes.hand_over(learners)
            else:
                self._hand_out(learners, root)
        elif self.state.phase in (Phase.CLOSING, Phase.AFTER) and len(self.terms.requests) == n_learners:
            for learner in learners:  # all ranks receive the same answer
                self.effects.send(learner.name, m.NoBatch(self.gate.w, self.state.is_draining))
            self.terms.requests.clear()

    def _hand_out(self, learners: list[Member], root: str) -> None:
        fills_a_batch = len(self.state.ledger.ready) >= self.rules.batch_size
        if self.batcher.is_at_the_end and self.rules.drop_last and not fills_a_batch:
            self.rollouts.refund_all(Refund.END_OF_DATA)
        n_groups = self.batcher.n_next()
        if n_groups:
            batch = self.batcher.take(n_groups)
            self.refill.restart()
            self._write_savepoint(batch.step + 1, root)
            self.batcher.hand_out(batch, learners)
            self.terms.hand_out()


def largest(*lags: int | None) -> int | None:
    """The largest of the lags that are not None."""
    return max((lag for lag in lags if lag is not None), default=None)
