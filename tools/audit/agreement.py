"""The head's account held against what generators and rewards say of their own work; knows no clock and no ledger."""

from collections import Counter
from collections.abc import Mapping

from tools.audit.makers import Evidence, attempt_of, key, sample_of, uid_of
from tools.audit.prompts import REFUNDED, Prompts, Sample
from tools.audit.reading import File, Line
from tools.audit.terms import ATTEMPTS

KEPT_REFUSALS = 100_000


class Agreement:
    """Leases, verdicts and trajectories of the head, each with its counterpart. `term` is that of the line."""

    def __init__(self, file: File, evidence: Evidence) -> None:
        self.file, self.evidence = file, evidence
        self.n_leases = 0  # that their generators' own lines tell of
        self.refused: Counter[str] = Counter()
        self._refused_samples: set[int] = set()

    def lease(self, line: Line, *, term: int, v: int) -> None:
        """Whoever began it held what was published, by a push of this term (I7)."""
        held = self.evidence.held.get((line["holder"], line["uid"], line["attempt"]))
        if held is None:
            return
        self.n_leases += 1
        handed, continued = line.get("n_done", 0), self.evidence.continued[line["holder"], line["uid"], line["attempt"]]
        if continued > handed:
            text = (
                f"a generator goes on from what the head handed it: {handed} tokens, {line['holder']} has {continued}"
            )
            self.file.add("I5", text, uid=line["uid"])
        if held < (term, v):
            of = f", of term {held[0]}" if held[0] != term else ""
            text = f"a generator that does not hold v = {v} gets no work: {line['holder']} itself held {held[1]}{of}"
            self.file.add("I7", text, uid=line["uid"])

    def score(self, line: Line, sample: Sample, *, term: int, u: int) -> None:
        ids = {"uid": line["uid"], "sample": line["sample"], "attempt": sample.attempt}
        if sample.newest > u:
            self.file.add("I6", f"a version makes tokens after its update: {sample.newest}, u is {u}", **ids)
        known = key(line["uid"], line["sample"], sample.attempt)
        if sample.attempt < term * ATTEMPTS:
            self._of_this_history(known, sample, term, ids)
        self._as_given(known, sample, ids)

    def _of_this_history(self, known: int, sample: Sample, term: int, ids: Mapping[str, int]) -> None:
        """What later versions of an older term made counts no more (I6)."""
        made_in = self.evidence.made_in(known)
        base = self.evidence.terms.base(after=made_in, to=term)
        if known in self.evidence.completions and base is not None and sample.newest > base:
            rule = f"of what term {made_in} made, versions up to {base} count in term {term}"
            self.file.add("I6", f"{rule}: it has tokens of version {sample.newest}", **ids)

    def _as_given(self, known: int, sample: Sample, ids: Mapping[str, int]) -> None:
        """The verdict is the reward's own (I10)."""
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
            self.file.add("I10", text, **ids)

    def train(self, line: Line, sample: Sample | None, *, is_undone: bool) -> None:
        """A trajectory of a batch is as its generator made it (I5). What is undone may be trained once more."""
        uid, number = line["uid"], line["sample"]
        known, completions = key(uid, number, line["attempt"]), self.evidence.completions
        made = completions.get(known) if is_undone else completions.pop(known, None)
        if made is not None and list(made) != line["versions"]:
            text = f"versions are stamped where the token is made: {line['versions']}, its generator says {list(made)}"
            self.file.add("I5", text, uid=uid, sample=number)
        elif made is None and sample is not None and sample.holder in self.evidence.generators:
            text = f"a trajectory is made by its generator: {sample.holder} completed none"
            self.file.add("I5", text, uid=uid, sample=number)

    def forget(self, uid: int, samples: Mapping[int, Sample]) -> None:
        """What came of these completions is known."""
        for number, sample in samples.items():
            self.evidence.completions.pop(key(uid, number, sample.attempt), None)

    def refuse(self, line: Line) -> None:
        self.refused[line["what"]] += 1
        is_result = line["what"] != "Partial"
        if is_result and "uid" in line and "sample" in line and len(self._refused_samples) < KEPT_REFUSALS:
            self._refused_samples.add(key(line["uid"], line["sample"], line.get("attempt", 0)))

    def lost_verdicts(self, prompts: Prompts, *, before: float) -> None:
        """A verdict that a reward gave, of a prompt that was not refunded, is accepted or refused, not lost (I9).

        Those of older terms may have been lost with their head, or with the timeline that they belonged to.
        """
        state = prompts.state
        for known, score in self.evidence.scores.items():
            uid, attempt = uid_of(known), attempt_of(known)
            is_awaited = attempt >= prompts.first_attempt and uid < len(state) and state[uid] != REFUNDED
            if score.wall < before and is_awaited and not self._is_refused(known):
                text = "nobody drops in silence: this verdict was neither accepted nor refused by the head"
                ids = {"uid": uid, "sample": sample_of(known), "attempt": attempt}
                self.file.findings.add("I9", score.where, text, **ids)

    def _is_refused(self, known: int) -> bool:
        return known in self._refused_samples or len(self._refused_samples) >= KEPT_REFUSALS


def as_scored(file: File, line: Line, sample: Sample) -> None:
    """A trajectory of a batch is as its `scored` line said."""
    ids = {"uid": line["uid"], "sample": line["sample"]}
    if sample.status != "value":
        text = f"a {sample.status} is no number: it is trained with reward {line['reward']}"
        file.add("I10", text, **ids)
    elif line["reward"] != sample.reward:
        text = f"a trajectory is trained with its verdict: {sample.reward}, not {line['reward']}"
        file.add("I10", text, **ids)
    if line["n_tokens"] != sample.n_tokens:
        text = f"tokens trained are tokens received: {sample.n_tokens}, not {line['n_tokens']}"
        file.add("I12", text, **ids)
    if line["attempt"] != sample.attempt:
        file.add("I6", f"attempt {line['attempt']} is trained, attempt {sample.attempt} was accepted", **ids)
