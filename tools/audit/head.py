"""The head's file, played through once more: every decision against the rules, and against what the others say.

The rules of the clock, the prompts, the batches and the members are in modules of their own; here lines meet them.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from tools.audit.ages import Ages, Lengths
from tools.audit.batches import Batches
from tools.audit.clock import Clock
from tools.audit.makers import Evidence, key
from tools.audit.members import Members
from tools.audit.prompts import REFUNDED, Prompts, Sample
from tools.audit.reading import File, Handler, Line
from tools.audit.setup import Setup

KEPT_REFUSALS = 100_000
LAST_S = 5.0  # what was given within the last seconds may have been under way when the head ended


@dataclass(slots=True)
class Tokens:
    """Sampled training tokens by what became of them (I12)."""

    received: int = 0
    in_batches: int = 0
    waiting: int = 0  # received, of prompts that are open at the last line
    dropped: Counter[str] = field(default_factory=Counter)  # by reason of the refund


@dataclass(slots=True)
class Evaluated:
    """Verdicts of one evaluation."""

    n: int = 0
    rewards: list[float] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)


class Head:
    """One life of the head. `life` counts those in the file: only the first has a beginning that the journal shows."""

    def __init__(self, setup: Setup, file: File, evidence: Evidence) -> None:
        self.setup, self.file, self.evidence = setup, file, evidence
        self.clock = Clock(setup, file)
        self.prompts = Prompts(file)
        self.batches = Batches(setup, file, self.prompts)
        self.members = Members(file)
        self.ages = Ages(setup)
        self.tokens = Tokens()
        self.lengths = {kind: Lengths() for kind in ("scored", "trained", "dropped")}
        self.dropped: dict[str, Lengths] = {}  # by reason of the refund
        self.n_unscored = 0  # samples of refunded prompts that had no verdict yet
        self.refused: Counter[str] = Counter()
        self.evaluations: dict[str, Evaluated] = {}
        self.n_evaluations = self.n_joined = 0
        self.lives = 0
        self.end: Line | None = None  # its last line
        self._refused_samples: set[int] = set()
        self._heard = 0.0  # of the last event
        self._is_stalled = False

    def handlers(self) -> dict[str, Handler]:
        """For the lines of the first life; a later one went on from a state that no line tells."""
        inside = {
            "joined": self.on_joined,
            "member": self.on_member,
            "admit": self.on_admit,
            "lease": self.on_lease,
            "scored": self.on_scored,
            "ready": self.on_ready,
            "refused": self.on_refused,
            "batch": self.on_batch,
            "trajectory": self.on_trajectory,
            "refund": self.on_refund,
            "update": self.on_update,
            "push": self.clock.push,
            "publish": self.clock.publish,
            "evaluation": self.on_evaluation,
            "end": self.on_end,
            "sampled": lambda line: None,
            "push_broken": lambda line: None,
        }
        return {"start": self.on_start} | {event: self._while_first(handler) for event, handler in inside.items()}

    def _while_first(self, handler: Handler) -> Handler:
        def handle(line: Line) -> None:
            if self.lives <= 1:
                self._stalls(line["t"])
                self._heard = line["t"]
                handler(line)

        return handle

    def on_start(self, line: Line) -> None:
        self.lives += 1
        self._heard = line["t"]

    # members

    def on_joined(self, line: Line) -> None:
        for name in self.members.join(line):
            self.prompts.lose(name)

    def on_member(self, line: Line) -> None:
        gone = self.members.change(line)
        if gone is not None:
            self.prompts.lose(gone)

    # prompts

    def on_admit(self, line: Line) -> None:
        self.clock.admit(line)
        self.prompts.admit(line)
        self.batches.admitted(line["uid"])

    def on_lease(self, line: Line) -> None:
        self.prompts.lease(line)
        self.members.feed(line, self.clock.v)
        uid, attempt = line["uid"], line["attempt"]
        held = self.evidence.held.get((line["holder"], uid, attempt))
        if held is None:
            return
        self.n_joined += 1
        if held < self.clock.v:
            text = (
                f"a generator that does not hold v = {self.clock.v} gets no work: {line['holder']} itself held {held}"
            )
            self.file.add("I7", text, uid=uid)

    def on_scored(self, line: Line) -> None:
        if line.get("evaluation", ""):
            self._evaluated(line)
            return
        self.tokens.received += line["n_tokens"]
        sample = self.prompts.score(line)
        if sample is None:
            return
        self.lengths["scored"].add(sample.n_tokens, sample.finish)
        self._agrees(line, sample)

    def _agrees(self, line: Line, sample: Sample) -> None:
        """The verdict is the reward's own (I10)."""
        known = key(line["uid"], line["sample"], line["attempt"])
        scores = self.evidence.scores_of(known)
        for score in scores:
            if score.status == sample.status and (sample.status != "value" or score.reward == sample.reward):
                self.evidence.scores.pop(known)
                self.evidence.more_scores.pop(known, None)
                return
        if scores:
            text = (
                f"a verdict reaches the head as it was given: {sample.status} {sample.reward}, at {scores[0].where} "
                f"{scores[0].status} {scores[0].reward}"
            )
            self.file.add("I10", text, uid=line["uid"], sample=line["sample"])

    def on_ready(self, line: Line) -> None:
        self.prompts.ready(line)

    def on_refused(self, line: Line) -> None:
        self.refused[line["what"]] += 1
        if "uid" in line and "sample" in line and len(self._refused_samples) < KEPT_REFUSALS:
            self._refused_samples.add(key(line["uid"], line["sample"], line.get("attempt", 0)))

    def on_refund(self, line: Line) -> None:
        self.batches.finish()
        self.clock.refund()
        prompt = self.prompts.refund(line)
        if prompt is None:
            return
        self.tokens.dropped[line["reason"]] += prompt.n_tokens
        self.n_unscored += prompt.n - len(prompt.scored)
        by_reason = self.dropped.setdefault(line["reason"], Lengths())
        for number, sample in prompt.scored.items():
            self.lengths["dropped"].add(sample.n_tokens, sample.finish)
            by_reason.add(sample.n_tokens, sample.finish)
            self.evidence.completions.pop(key(prompt.uid, number, sample.attempt), None)

    # batches

    def on_batch(self, line: Line) -> None:
        self.clock.take(line)
        self.batches.take(line)

    def on_trajectory(self, line: Line) -> None:
        prompt = self.batches.trajectory(line)
        self.tokens.in_batches += line["n_tokens"]
        self.lengths["trained"].add(line["n_tokens"], line["finish"])
        if prompt is None:
            return
        self.ages.take(line, prompt.born, self.file)
        uid, number, attempt = line["uid"], line["sample"], line["attempt"]
        sample = prompt.scored.get(number)
        if sample is not None:
            self._is_as_scored(line, sample)
        made = self.evidence.completions.pop(key(uid, number, attempt), None)
        if made is not None and list(made) != line["versions"]:
            text = f"versions are stamped where the token is made: {line['versions']}, its generator says {list(made)}"
            self.file.add("I5", text, uid=uid, sample=number)
        elif made is None and sample is not None and sample.holder in self.evidence.generators:
            text = f"a trajectory is made by its generator: {sample.holder} completed none"
            self.file.add("I5", text, uid=uid, sample=number)

    def _is_as_scored(self, line: Line, sample: Sample) -> None:
        ids = {"uid": line["uid"], "sample": line["sample"]}
        if sample.status != "value":
            text = f"a {sample.status} is no number: it is trained with reward {line['reward']}"
            self.file.add("I10", text, **ids)
        elif line["reward"] != sample.reward:
            text = f"a trajectory is trained with its verdict: {sample.reward}, not {line['reward']}"
            self.file.add("I10", text, **ids)
        if line["n_tokens"] != sample.n_tokens:
            text = f"tokens trained are tokens received: {sample.n_tokens}, not {line['n_tokens']}"
            self.file.add("I12", text, **ids)
        if line["attempt"] != sample.attempt:
            self.file.add("I6", f"attempt {line['attempt']} is trained, attempt {sample.attempt} was accepted", **ids)

    def on_update(self, line: Line) -> None:
        self.clock.update(line)
        self.batches.update(line)

    # evaluations

    def _evaluated(self, line: Line) -> None:
        known = self.evaluations.setdefault(line["evaluation"], Evaluated())
        known.n += 1
        if line["status"] == "value":
            known.rewards.append(line["reward"])
            if line["correct"] is not None:
                known.judged.append(line["correct"])

    def on_evaluation(self, line: Line) -> None:
        """Figures are those of the values alone: a timeout or an error is counted, never a 0 (I10)."""
        known = self.evaluations.pop(line["name"], Evaluated())
        self.n_evaluations += 1
        told = (line["n"], line["reward"], line["accuracy"])
        mine = (known.n, _mean(known.rewards), _mean(known.judged))
        n_without = known.n - len(known.rewards)
        if line["n_failed"] < n_without or not all(map(_same, told, mine)):
            rule = f"an evaluation's n, reward and accuracy are of its values alone ({n_without} have none)"
            self.file.add("I10", f"{rule}: {mine}, not {told}", version=line["version"])

    # the end

    def on_end(self, line: Line) -> None:
        self.end = line

    def close(self, *, ended: bool) -> None:
        """After the last line. `ended`: the run came to its end, so nothing may be left open."""
        self.batches.finish(torn=not ended)
        self._stalls(self.file.last_t)
        self.clock.close(self.file.last_t)
        self.prompts.close(ended=ended)
        if ended and self.clock.v != self.clock.u:
            self.file.add("I11", f"at the end the last update is published: v {self.clock.v}, u {self.clock.u}")
        for prompt in self.prompts.open.values():
            self.tokens.waiting += prompt.n_tokens
            for number, sample in prompt.scored.items():
                self.evidence.completions.pop(key(prompt.uid, number, sample.attempt), None)
        if ended:
            self._lost_verdicts(before=(self.end or {}).get("wall", 0.0) - LAST_S)
        tokens = self.tokens
        told = tokens.in_batches + tokens.dropped.total() + tokens.waiting
        if tokens.received != told and not self.batches.is_torn and not self.file.findings.n:
            self.file.add("I12", f"tokens received = in batches + dropped + waiting: {tokens.received}, {told}")

    def _lost_verdicts(self, *, before: float) -> None:
        """A verdict that a reward gave, of a prompt that was not refunded, is accepted or refused, not lost (I9)."""
        state = self.prompts.state
        for known, score in self.evidence.scores.items():
            uid = known >> 32
            not_refunded = uid < len(state) and state[uid] != REFUNDED
            if score.wall < before and not_refunded and not self._is_refused(known):
                text = "nobody drops in silence: this verdict was neither accepted nor refused by the head"
                ids = {"uid": uid, "sample": known >> 16 & 0xFFFF, "attempt": known & 0xFFFF}
                self.file.findings.add("I9", score.where, text, **ids)

    def _is_refused(self, known: int) -> bool:
        return known in self._refused_samples or len(self._refused_samples) >= KEPT_REFUSALS

    def _stalls(self, t: float) -> None:
        """Nobody at work, a generator there, prompts live and every deadline past: everyone waits (I11)."""
        patience_s, size = self.setup.patience_s, self.setup.batch_size
        prompts, clock = self.prompts, self.clock
        if patience_s is None or size is None or t - self._heard <= patience_s or not prompts.open:
            return
        n_at_work = len(prompts.open) - prompts.n_ready - prompts.n_queued
        if n_at_work == 0 and clock.w == clock.u and prompts.n_ready < size and self.members.any_waits:
            text = (
                f"no state has everyone waiting: {t - self._heard:.0f} s without an event; {len(prompts.open)} prompts "
                f"live, {prompts.n_ready} ready, {prompts.n_queued} queued, none sampled, trained or scored"
            )
            self.file.add("I11", text)


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other))
