"""Replays the head's journal line by line: passes each line to the modules that hold the rules."""

from collections.abc import Mapping

from tools.audit.figures import is_same
from tools.audit.journal_reader import Handler, JournalFile, Line
from tools.audit.replay import terms
from tools.audit.replay.accounting import Ages, Tokens, Undone
from tools.audit.replay.actor_logs import Evidence, digest, figures_of
from tools.audit.replay.batches import BatchChecks
from tools.audit.replay.clock import Clock
from tools.audit.replay.cross_check import Agreement, as_scored
from tools.audit.replay.evaluations import Evaluations
from tools.audit.replay.ledger import AcceptedSample, AuditedPrompt, Prompts
from tools.audit.replay.members import Members, Splits, held_by
from tools.audit.replay.pushes import Pushing
from tools.audit.replay.rollback import Rollback
from tools.audit.replay.terms import ATTEMPTS
from tools.audit.run_settings import RunSettings


class Stalls:
    """`hear` every event of the head, `look` at the end of a life."""

    def __init__(self, setup: RunSettings, file: JournalFile, clock: Clock, prompts: Prompts, members: Members) -> None:
        self.setup, self.file = setup, file
        self.clock, self.prompts, self.members = clock, prompts, members
        self._heard = 0.0  # time of the last event, without the seconds in which the head was not scheduled

    def begin(self, t: float) -> None:
        self._heard = t - self.file.still_s

    def hear(self, line: Line) -> None:
        """Note the silence before the line. If a learner joins next, all waited for its start version."""
        patience_s = self.setup.patience_s
        t = line["t"] - self.file.still_s
        if patience_s is not None and t - self._heard > patience_s and not _is_learner_back(line):
            self.look(line["t"])
        self._heard = t

    def look(self, t: float) -> None:
        """Report a standstill: no member works, a generator is idle, prompts are live and all deadlines have passed."""
        patience_s, size = self.setup.patience_s, self.setup.batch_size
        prompts, clock = self.prompts, self.clock
        silent_s = t - self.file.still_s - self._heard
        if patience_s is None or size is None or silent_s <= patience_s or not prompts.open:
            return
        n_at_work = len(prompts.open) - prompts.n_ready - prompts.n_queued
        if n_at_work == 0 and clock.w == clock.u and prompts.n_ready < size and self.members.there():
            n = f"{len(prompts.open)} prompts live, {prompts.n_ready} ready, {prompts.n_queued} queued, none at work"
            self.file.add("I11", f"no state has everyone waiting: {silent_s:.0f} s without an event; {n}")


def _life(name: str) -> int:
    """The incarnation of an actor."""
    return int(name.rpartition(".")[2] or 0)


def _is_learner_back(line: Line) -> bool:
    return line["event"] == "joined" and str(line["name"]).startswith("learner-")


class HeadReplay:
    """All incarnations of the head, file after file. A later one is judged from its first `term` line on."""

    def __init__(self, setup: RunSettings, file: JournalFile, evidence: Evidence) -> None:
        self.setup, self.file, self.evidence, self.terms = setup, file, evidence, evidence.terms
        self.clock = Clock(setup, file)
        self.prompts = Prompts(file, self.clock, self.terms)
        self.batches = BatchChecks(setup, file, self.prompts, self.terms)
        self.members = Members(file)
        self.splits = Splits(file, self.clock, self.members)
        self.pushing = Pushing(file, self.members, evidence)
        self.evaluations = Evaluations(setup, file, self.clock, evidence)
        self.agreement = Agreement(file, evidence)
        self.stalls = Stalls(setup, file, self.clock, self.prompts, self.members)
        self.ages, self.undone_ages = Ages(setup), Ages(setup)
        self.tokens, self.undone = Tokens(), Undone()
        self._rolls_back_to: int | None = None  # a rollback that no term has obeyed yet
        self.has_rolled_back = False
        self.lives = 0
        self.term: int | None = None  # None before the first `term` line
        self.unseen = ""  # why the ledger of a later incarnation cannot be judged
        self.end: Line | None = None  # the last line of its last incarnation
        self._is_judged = True  # the ledger's state at the beginning of this incarnation is known

    def handlers(self) -> dict[str, Handler]:
        """Handlers of lines that are checked in every incarnation."""
        always: dict[str, Handler] = {
            "joined": self.on_joined,
            "member": self.on_member,
            "refused": self.agreement.refuse,
            "evaluation": self.on_evaluation,
            "term": self.on_term,
            "collapse": self.on_collapse,
            "split": self.splits.begin,
            "end": self.on_end,
            "sampled": self.on_sampled,
            "push_broken": self.pushing.break_,
        }
        ledger: dict[str, Handler] = {
            "admit": self.on_admit,
            "lease": self.on_lease,
            "unsampled": self.prompts.unsampled,
            "scored": self.on_scored,
            "compare": self.prompts.compare,
            "compared": self.on_compared,
            "ready": self.prompts.ready,
            "batch": self.on_batch,
            "trajectory": self.on_trajectory,
            "refund": self.on_refund,
            "update": self.on_update,
            "push": self.on_push,
            "publish": self.on_publish,
        }
        ways = {event: self._heed(handler) for event, handler in always.items()}
        return ways | {event: self._heed(self._judge(handler)) for event, handler in ledger.items()}

    def _heed(self, handler: Handler) -> Handler:
        def handle(line: Line) -> None:
            self.stalls.hear(line)
            is_known = self._is_judged and not self.unseen and line["event"] != "term"
            if is_known and self.term is not None and line.get("term", self.term) != self.term:
                self.file.add("I6", f"a line of the head has its term: {self.term}, not {line['term']}")
            handler(line)

        return handle

    def _judge(self, handler: Handler) -> Handler:
        """Handlers of lines that need the ledger's state at the beginning of the incarnation."""

        def handle(line: Line) -> None:
            if not self._is_judged:
                self.unseen = f"the head lived {self.lives} times, and no line says from what the last life went on"
            if not self.unseen:
                handler(line)

        return handle

    # incarnations and terms

    def enter(self, file: JournalFile) -> dict[str, Handler]:
        """Begin the file of the next incarnation. Returns its handlers."""
        self.file = file
        ledger = (self.clock, self.prompts, self.prompts.passes, self.batches)
        of_members = (self.members, self.splits, self.pushing)
        for part in (*ledger, *of_members, self.evaluations, self.agreement, self.stalls):
            part.file = file
        return {"start": self.on_start} | self.handlers()

    def leave(self) -> None:
        """End of the file: the incarnation ended or was killed."""
        self.stalls.look(self.file.last_t)
        self.clock.close(self.file.last_t)

    def on_start(self, line: Line) -> None:
        self.lives += 1
        self.end = None
        self.stalls.begin(line["t"])
        if self.lives > 1:
            self._is_judged = False
            self.members.begin_life()
            self.splits.begin_life()
            self.pushing.begin()
            self.evaluations.go_back()
            self.batches.finish(torn=True)
            self.clock.forget_pushes()

    def on_collapse(self, line: Line) -> None:
        """A rollback is ordered at most once, to a version that is older."""
        if line["action"] != "rollback":
            return
        version, back = line["version"], line["to"]
        if self.has_rolled_back or not back < version:
            text = f"one rollback a run, to an older version: from {version} to {back}"
            self.file.add("I6", text, version=version)
        self._rolls_back_to, self.has_rolled_back = back, True

    def _obey(self, beginning: terms.TermStart) -> None:
        """The first term after the order of a rollback begins at its version, or at one before."""
        back, self._rolls_back_to = self._rolls_back_to, None
        if back is None:
            return
        if beginning.version > back:
            text = f"a rollback to version {back} is obeyed: the next term begins at {beginning.version}"
            self.file.add("I6", text, version=beginning.version)
        self.undone.on_purpose += max(0, self.clock.u - beginning.version)

    def on_term(self, line: Line) -> None:
        """A term begins: restore the ledger of its version, which may be earlier or later."""
        beginning = terms.read(line)
        is_same_head, self._is_judged = self._is_judged, True
        if self.term is not None and beginning.term <= self.term:
            self.file.add("I6", f"terms count on: {beginning.term} after {self.term}")
        is_first = not (self.terms.n_begun or self.clock.n_admitted or self.clock.u)
        if is_first and (beginning.version or beginning.next_uid):
            self.unseen = f"the journal begins at term {beginning.term}, version {beginning.version}: what was before?"
        self.term = beginning.term
        self.terms.begin(beginning)
        if self.unseen:
            return
        if beginning.lives_on and self.clock.outlive(beginning.version):
            self.batches.outlive(self._figures(beginning))
        self.batches.go_back(beginning.version)
        self.evaluations.go_back()
        self.members.begin_term()
        self.pushing.begin()
        self._obey(beginning)
        self.undone.updates += self.clock.go_back(beginning, is_same_head=is_same_head)
        rollback = Rollback(self.prompts, beginning, is_same_head=is_same_head)
        rollback.run()
        self.prompts.first_attempt = beginning.term * ATTEMPTS
        self.prompts.is_at_the_end = False
        self.undone.prompts += rollback.n_erased
        for prompt, samples in rollback.lost:
            self._drop(prompt, samples, "lost_timeline")
        self.tokens.found += sum(sample.n_tokens for _, found in rollback.found for sample in found.values())

    def _figures(self, beginning: terms.TermStart) -> Line | None:
        """Figures of an update that no head recorded, from the journal of the surviving learner."""
        version, learner = beginning.version, self.members.root
        if beginning.restored:
            lives = [_life(name) for name, made in self.evidence.steps if made == version]
            before = [life for life in lives if life < _life(learner)]
            learner = f"learner-0.{max(before)}" if before else learner
        known = self.evidence.steps.get((learner, version))
        if known is None and (learner in self.evidence.learners or not learner):
            text = f"a survivor continues at a version that it made: {learner or 'none'} has no step line of {version}"
            self.file.add("I6", text, version=version)
        if known is not None and "digest" in known:
            self.evidence.outlived.append(((beginning.term, version), known["digest"], learner))
        return known

    def _drop(self, prompt: AuditedPrompt, samples: Mapping[int, AcceptedSample], reason: str) -> None:
        self.tokens.drop(samples.values(), reason)
        self.agreement.forget(prompt.uid, samples)

    # members

    def on_joined(self, line: Line) -> None:
        self.agreement.join(line)
        self.splits.join(line)
        for name in self.members.join(line):
            self.pushing.lose(name)
            self.prompts.lose(name)

    def on_member(self, line: Line) -> None:
        gone, held = self.members.change(line), held_by(line)
        if held is not None and not self.unseen:
            self.pushing.hold(line["name"], held)
        if gone is not None:
            self.pushing.lose(gone)
            self.prompts.lose(gone)

    def on_evaluation(self, line: Line) -> None:
        self.evaluations.close(line)
        if self._is_judged and not self.unseen:
            self.evaluations.check_moment(line)

    # prompts

    def on_admit(self, line: Line) -> None:
        self.clock.admit(line)
        self.prompts.admit(line)
        self.batches.admitted(line["uid"])

    def on_lease(self, line: Line) -> None:
        known = self.prompts.open.get(line["uid"])
        is_first = known is not None and known.attempt is None
        prompt = self.prompts.lease(line)
        self.members.feed(line, self.clock.v, is_first=is_first)
        self.splits.lease(line)
        self.agreement.lease(line, prompt, term=self.term or 0, v=self.clock.v)

    def on_sampled(self, line: Line) -> None:
        """Prompts are unknown before the `term` line of an incarnation."""
        if self._is_judged and not self.unseen and not line.get("evaluation", ""):
            self.prompts.sampled(line)
            self.agreement.sampled(line, self.prompts.open.get(line["uid"]), n_admitted=len(self.prompts.state))

    def on_scored(self, line: Line) -> None:
        if line.get("evaluation", ""):
            self.evaluations.score(line)
            self.agreement.evaluated(line)
            return
        self.tokens.received += line["n_tokens"]
        sample = self.prompts.score(line)
        if sample is not None:
            self.agreement.score(line, sample, term=self.term or 0, u=self.clock.u)

    def on_compared(self, line: Line) -> None:
        self.prompts.compared(line)
        self.agreement.compared(line)

    def on_refund(self, line: Line) -> None:
        self.batches.finish()
        self.clock.refund()
        prompt = self.prompts.refund(line)
        if prompt is None or prompt.uid in self.prompts.closed:
            return  # a sample that is open again in a later term was not dropped
        self._drop(prompt, prompt.scored, line["reason"])

    # batches

    def on_batch(self, line: Line) -> None:
        self.clock.take(line)
        self.splits.batch(line)
        self.batches.take(line)

    def on_trajectory(self, line: Line) -> None:
        is_undone = self.batches.current is not None and self.batches.current.is_undone
        n_groups = self.batches.n_groups_seen
        prompt = self.batches.trajectory(line)
        self._count(line, is_undone=is_undone)
        if prompt is None:
            return
        if self.batches.n_groups_seen > n_groups and not is_undone:
            for number, left_out in self.prompts.left_out(prompt).items():
                self._drop(prompt, {number: left_out}, f"reward_{left_out.status}")
        ages = self.undone_ages if is_undone else self.ages
        if line["born"] != prompt.born:
            text = f"born stays what it was at admission: {prompt.born}, not {line['born']}"
            self.file.add("I7", text, uid=prompt.uid, sample=line["sample"])
        ages.take(line, prompt.born, self.file)
        sample = self._verdict(prompt, line)
        if sample is not None:
            rewards = prompt.trained_with(line["sample"])
            as_scored(self.file, line, sample, rewards, has_reward=self.prompts.has_reward(sample))
        self.agreement.train(line, is_undone=is_undone)

    def _verdict(self, prompt: AuditedPrompt, line: Line) -> AcceptedSample | None:
        """The verdict of a trajectory, perhaps one that a term lost and a later one restored."""
        number, attempt = line["sample"], line["attempt"]
        sample = prompt.scored.get(number)
        if sample is not None and sample.attempt != attempt:
            for other, earlier in prompt.earlier:
                if other == number and earlier.attempt == attempt:
                    self._drop(prompt, {number: sample}, "lost_timeline")
                    self.tokens.found += earlier.n_tokens
                    prompt.scored[number] = earlier
                    return earlier
        return sample

    def _count(self, line: Line, *, is_undone: bool) -> None:
        if is_undone:
            self.undone.trajectories += 1
            self.undone.tokens += line["n_tokens"]
        else:
            self.tokens.in_batches += line["n_tokens"]

    def on_update(self, line: Line) -> None:
        self.clock.update(line)
        self.batches.update(line)
        digest(self.file, self.evidence, line)
        self._compare_step(line)

    def _compare_step(self, line: Line) -> None:
        """The learner's own line of the step has the same figures (I12)."""
        learner, version = self.members.root, line["version"]
        step = self.evidence.steps.get((learner, version))
        if step is None:
            if learner in self.evidence.learners:
                text = f"an update is its learner's: {learner} has no step line of version {version}"
                self.file.add("I6", text, version=version)
            return
        told = figures_of(line)
        step = {"digest": told.get("digest")} | step  # older journals have none
        for name in sorted(step.keys() | told.keys()):
            if not is_same(step.get(name), told.get(name)):
                text = f"an update has the figures of its step: {name} {step.get(name)}, not {told.get(name)}"
                self.file.add("I12", text, version=version)

    def on_push(self, line: Line) -> None:
        self.clock.push(line)
        self.pushing.push(line, v=self.clock.v)

    def on_publish(self, line: Line) -> None:
        self.clock.publish(line)
        self.pushing.publish(line)

    # the end

    def on_end(self, line: Line) -> None:
        self.end = line

    def close(self, *, ended: bool) -> None:
        """After the last line. `ended`: the run ended normally, so nothing may be open."""
        self.batches.finish(torn=not ended)
        self.prompts.close(ended=ended)
        self.evidence.compare_bases(self.file.findings)
        if not self.unseen:
            self.pushing.close()
            self.agreement.unleased()
        if ended and self.clock.v != self.clock.u:
            self.file.add("I11", f"at the end the last update is published: v {self.clock.v}, u {self.clock.u}")
        for prompt in self.prompts.open.values():
            self.tokens.waiting += prompt.n_tokens
            self.agreement.forget(prompt.uid, prompt.scored)
        if ended:
            self.agreement.lost_verdicts(self.prompts, before=(self.end or {}).get("wall", 0.0))
        received, told = self.tokens.received + self.tokens.found, self.tokens.accounted
        if received != told and not self.batches.is_torn and not self.file.findings.n:
            self.file.add("I12", f"tokens received = in batches + dropped + waiting: {received}, {told}")
