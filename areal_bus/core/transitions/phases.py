"""The phases of a run: assemble, evaluate, train, close, evaluate, stop; draining. `advance` runs after each event."""

from collections.abc import Mapping
from dataclasses import replace

from areal_bus import messages as m
from areal_bus.core import evaluation as plan
from areal_bus.core.effects import Effects
from areal_bus.core.evaluation import Evaluation
from areal_bus.core.events import Event
from areal_bus.core.members.membership import MemberState
from areal_bus.core.parts.head_checkpoint import Figures, HeadCheckpoint
from areal_bus.core.state import HeadState, Phase
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.messages import Refund, Role


class Phases:
    """Moves the run from phase to phase, opens evaluations, and ends the job."""

    def __init__(self, state: HeadState, effects: Effects, rollouts: Rollouts) -> None:
        self.state, self.effects = state, effects
        self.rules, self.gate, self.terms = state.rules, state.gate, state.terms
        self.evaluations = state.evaluations
        self.rollouts = rollouts

    def advance(self) -> None:
        """Enter each phase whose condition now holds."""
        state, gate = self.state, self.gate
        if state.phase is Phase.TRAINING and not state.is_draining:
            self._evaluation_is_over()
            if not self._is_trained():
                return  # most of the time
        if state.phase is Phase.ASSEMBLING and state.is_draining:
            self._drain_early()
        if state.phase is Phase.ASSEMBLING and not state.is_draining and self._is_complete():
            self.begin()
        if state.phase is Phase.BEFORE and self._evaluation_is_over():
            self._enter(Phase.TRAINING)
        if state.phase is Phase.TRAINING and self._is_trained():
            self._enter(Phase.CLOSING)
            self.save_checkpoint()  # open prompts stay open for a run that is extended
            self.rollouts.refund_all(Refund.END_OF_DATA if state.rows.is_exhausted else Refund.END_OF_RUN)
        if state.phase is Phase.TRAINING and state.is_draining and gate.u == gate.w and self.terms.begun_by:
            self._enter(Phase.CLOSING)
            self.save_checkpoint()  # open prompts stay open
            self.rollouts.drop_evaluation()
        self._advance_to_the_end()

    def _advance_to_the_end(self) -> None:
        state, gate = self.state, self.gate
        has_finished = len(self.terms.finished) == self.state.split.learners
        if state.is_draining and state.phase in (Phase.CLOSING, Phase.AFTER) and has_finished:
            self.end(0, f"drained at version {gate.u}")
        if state.phase is Phase.CLOSING and gate.v == gate.u and self._may_evaluate():
            self._enter(Phase.AFTER)
        if state.phase is Phase.AFTER and self._evaluation_is_over() and has_finished:
            self.end(0, self._early_sentence() if self._stops_early() else "done")

    def begin(self) -> None:
        """The ring is complete: run the first evaluation unless it is done, then train."""
        self._enter(Phase.BEFORE)

    def _enter(self, phase: Phase) -> None:
        self.state.phase = phase
        self.effects.progress("phase", phase=str(phase))

    def _is_complete(self) -> bool:
        """All learners, one reward and one generator are ready; at eta = 0 all generators that get a share."""
        rules, members, split = self.rules, self.state.members, self.state.split
        n_eligible = len(self.state.eligible_generators())
        excluded = [x for x in self.state.excluded_generators() if x.index < split.generators]
        return (
            n_eligible >= (max(1, len(self.state.own_generators()) - len(excluded)) if rules.eta == 0 else 1)
            and bool(members.of(Role.REWARD, MemberState.HEALTHY))
            and len(members.of(Role.LEARNER, MemberState.HEALTHY)) == split.learners
        )

    def _is_trained(self) -> bool:
        if self.state.change.is_handing_over:
            return False  # the learners that follow end the run
        if self.gate.u >= self.rules.total_steps or (self.gate.u == self.gate.w and self._stops_early()):
            return True
        return self.state.rows.is_exhausted and self.gate.u == self.gate.w and not self.state.ledger.n_live

    # checkpoints

    def save_checkpoint(self) -> None:
        """Capture and write the head checkpoint of this version."""
        self._save(self.state.checkpoint(self.gate.u))

    def _save(self, checkpoint: HeadCheckpoint) -> None:
        self.terms.checkpoints[checkpoint.version] = checkpoint
        self.effects.save(checkpoint)

    # evaluations

    def _next_evaluation(self) -> tuple[str, plan.EvaluationSet] | None:
        """Moment and set of the next evaluation of this phase; None if there is none."""
        rules, figures, phase = self.rules, self.state.figures, self.state.phase
        sets = rules.evaluation_sets
        if self.state.is_draining:
            return None
        if phase is Phase.BEFORE and rules.evaluate_before and self.gate.u == 0:
            found = plan.first_missing("before", sets, figures)
            return None if found is None else ("before", found)
        if phase is Phase.AFTER and rules.evaluate_after:
            found = plan.first_missing("after", sets, figures)
            return None if found is None else ("after", found)
        if phase is Phase.TRAINING and self.state.change.is_next:
            return None  # it would restart after the change, and could delay it for ever
        if phase in (Phase.TRAINING, Phase.AFTER):
            return plan.due(self.gate.v, every=rules.evaluate_every, sets=sets, figures=figures)
        return None

    def _may_evaluate(self) -> bool:
        """Whether a generator holds the last version, or no evaluation follows."""
        evaluates = self.rules.evaluate_after or self.rules.evaluate_every
        return not evaluates or bool(self.state.eligible_generators())

    def _evaluation_is_over(self) -> bool:
        """Record an ended evaluation and open the next. Returns whether none is open and none follows."""
        evaluation = self.evaluations.close()
        if evaluation is not None:
            self._record_evaluation(evaluation)
        if self.evaluations.open is None and (following := self._next_evaluation()) is not None:
            self._open_evaluation(*following)
        return self.evaluations.open is None

    def _open_evaluation(self, when: str, problems: plan.EvaluationSet) -> None:
        """Evaluate the published version. At eta > 0, later versions may sample the remaining problems."""
        self.evaluations.open = Evaluation(
            plan.name_of(when, problems),
            self.gate.v,
            problems.n_samples,
            list(problems.problems),
            first_attempt=self.terms.term * m.ATTEMPTS,
            set_name=problems.name,
            max_new_tokens=problems.max_new_tokens,
        )

    def _record_evaluation(self, evaluation: Evaluation) -> None:
        for _, scored in sorted(evaluation.scored.items()):
            row = evaluation.rows[scored.uid]
            self.effects.keep(scored, step=None, clock=evaluation.version, n_masked=0, row=row)
        self.state.results[evaluation.name] = evaluation
        figures = self.state.figures[evaluation.name] = evaluation.figures()
        self.effects.record(Event.EVALUATION, **figures)
        self.effects.progress("evaluation", **figures)
        if not plan.decides(figures):
            lacks = f"lacks {evaluation.n_asked - len(evaluation.values)} of {evaluation.n_asked} answers"
            ignored = "checkpoint.keep_best and evaluate.early_stop_patience ignore it"
            text = f"evaluation {evaluation.name!r} {lacks}: under {plan.LEAST_SHARE:.0%} are there, so {ignored}"
            self.effects.progress("warning", text=text)
        if self.state.phase is Phase.AFTER:  # a run that is extended finds this version evaluated
            name = evaluation.name.replace("after", f"{plan.STEP}{evaluation.version}", 1)
            self._save_figures(name, figures | {"name": name})
        else:
            self._save_figures(evaluation.name, figures)

    def _save_figures(self, name: str, figures: Figures) -> None:
        """Store the result in head checkpoints: a term that begins at or after its versions need not evaluate again."""
        newest = figures["version_last"]
        least = newest if isinstance(newest, int) else self.gate.v
        for checkpoint in list(self.terms.checkpoints.values()):
            if checkpoint.version >= least:
                self._save(replace(checkpoint, results={**checkpoint.results, name: figures}))
        for savepoint in self.terms.savepoints():
            kept = savepoint.checkpoint
            if kept.version >= least:
                again = replace(savepoint, checkpoint=replace(kept, results={**kept.results, name: figures}))
                self.terms.mark(again)
                self.effects.mark(again)

    def _metric_values(self, *, with_ends: bool = False) -> list[tuple[int, float]]:
        rules = self.rules
        return plan.history(rules.evaluate_metric_set, rules.evaluate_metric, self.state.figures, with_ends=with_ends)

    def _stops_early(self) -> bool:
        patience = self.rules.evaluate_patience
        return bool(self.state.stopped) or (
            bool(patience) and plan.has_stopped_improving(self._metric_values(), patience=patience)
        )

    def _early_sentence(self) -> str:
        if self.state.stopped:
            return self.state.stopped
        rules, found = self.rules, plan.best(self._metric_values(with_ends=True))
        at = "" if found is None else f": {found[1]:.4f} at version {found[0]} is still the best"
        why = f"{rules.evaluate_metric} did not improve in {rules.evaluate_patience} evaluations"
        return f"stopped at version {self.gate.u}, because {why}{at}"

    # the end

    def drain(self) -> None:
        """End soon, so that a later start continues from here: finish and checkpoint the current update first."""
        if self.state.is_draining or self.state.phase is Phase.STOPPING:
            return
        self.state.is_draining = True
        self.effects.progress("note", name="head", text="drains: a checkpoint after this update, then the end")
        if self.state.phase is Phase.BEFORE:
            self._end_drained()

    def _drain_early(self) -> None:
        """Drain before the ring is complete. A learner that survived a head first writes its checkpoint."""
        restarted = bool(self.state.incarnation)
        if restarted and self.terms.begun_by is not None and self.gate.u:
            self._enter(Phase.CLOSING)
            self.save_checkpoint()
        elif self.terms.begun_by is not None or not (restarted and self.terms.may_be_outlived):
            self._end_drained()

    def _end_drained(self) -> None:
        version = self.state.version
        self.end(0, f"drained at version {version}" if version else "drained before the first step")

    def end_unassembled(self, errors: Mapping[str, str]) -> None:
        """The ring was not complete in time. `errors` has the last error of each quarantined generator."""
        if self.state.is_draining:
            self._end_drained()
            return
        rules, split = self.rules, self.state.split
        own = self.state.own_generators()
        wanted = {Role.LEARNER: range(split.learners), Role.REWARD: range(rules.n_rewards), Role.GENERATOR: own}
        awaited = self.state.members.awaited(wanted, errors)
        self.end(1, f"the ring must be complete within {rules.assemble_s:g} s; {awaited}")

    def end_after_refunds(self) -> None:
        """End the job when too many prompts in a row were refunded: nothing can be trained (I11)."""
        limit, error = max(3 * self.rules.batch_size, 16), self.state.last_refund_error
        if self.state.refunds_in_a_row >= limit:
            self.end(1, f"{limit} prompts in a row ended without a reward; the last one: {error}")

    def end(self, code: int, sentence: str) -> None:
        """Stop all members and end the job. Code 0 is success."""
        state = self.state
        if state.phase is Phase.STOPPING:
            return
        self._enter(Phase.STOPPING)
        for line in state.deaths.rest():
            self.effects.progress("warning", text=line)
        if text := state.score_failures.summary():
            self.effects.progress("warning", text=text)
        for member in state.members.alive():
            self.effects.send(member.name, m.Stop(sentence))
        self.effects.end(code, sentence)
