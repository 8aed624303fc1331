"""Compares the head's lines with those that generators and rewards wrote about their own work."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import Evidence, ScoreRecord, attempt_of, key, role_rewards_of, sample_of, uid_of
from tools.audit.replay.ledger import REFUNDED, AcceptedSample, AuditedPrompt, Prompts
from tools.audit.replay.terms import ATTEMPTS

Rewards = tuple[float, Mapping[str, float]]  # of a sample, and of its roles

KEPT_REFUSALS = 100_000
LAST_S = 5.0  # verdicts of the last seconds of the head, or of a killed reward, may be lost


class Agreement:
    """Compares leases, verdicts and trajectories of the head with the lines of the actors. `term`: that of the line."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence = file, evidence
        self.n_leases = 0  # with lines of the generator
        self.refused: Counter[str] = Counter()
        self.without_a_file: set[str] = set()  # rewards that joined and left no journal
        self.n_unheard = 0  # verdicts that must come from one of these
        self._refused_samples: set[int] = set()

    def join(self, line: Line) -> None:
        """A member joins by the pid and the host of a start in its own journal."""
        name, starts = line["name"], self.evidence.starts.get(line["name"], [])
        told = (line.get("pid"), line.get("host"))
        if starts and not any(told == (start.pid, start.host or told[1]) for start in starts):
            self.file.add("I6", f"a member joins as its process: {starts[-1]}, not {told} of {name}")
        if name.startswith("reward-") and name not in self.evidence.rewards:
            self.without_a_file.add(name)

    def lease(self, line: Line, prompt: AuditedPrompt | None, *, term: int, v: int) -> None:
        """The generator that began the lease held the published version, by a push of this term (I7)."""
        work = self.evidence.work.get((line["uid"], line["attempt"]))
        if work is None:
            return
        self.n_leases += 1
        work.is_leased = True
        if work.maker != line["holder"]:
            text = f"its holder samples a lease: it is {line['holder']}'s, {work.maker} began it"
            self.file.add("I6", text, uid=line["uid"], attempt=line["attempt"])
            return
        if prompt is not None:
            others = sorted(s for s in work.begun if not 0 <= s < prompt.n or s in prompt.scored)
            if others:
                text = f"a generator begins samples of its lease that have no verdict: not {others} of {prompt.n}"
                self.file.add("I8", text, uid=line["uid"])
        held, handed = work.held, line.get("n_done", 0)
        if work.n_continued > handed:
            rule = "a generator goes on from what the head handed it"
            text = f"{rule}: {handed} tokens, {line['holder']} has {work.n_continued}"
            self.file.add("I5", text, uid=line["uid"])
        if held < (term, v):
            of = f", of term {held[0]}" if held[0] != term else ""
            text = f"a generator that does not hold v = {v} gets no work: {line['holder']} itself held {held[1]}{of}"
            self.file.add("I7", text, uid=line["uid"])

    def score(self, line: Line, sample: AcceptedSample, *, term: int, u: int) -> None:
        ids = {"uid": line["uid"], "sample": line["sample"], "attempt": sample.attempt}
        if sample.newest > u:
            self.file.add("I6", f"a version makes tokens after its update: {sample.newest}, u is {u}", **ids)
        known = key(line["uid"], line["sample"], sample.attempt)
        if sample.attempt < term * ATTEMPTS:
            self._of_this_history(known, sample, term, ids)
        self._as_made(known, line, sample, ids)
        status, rewards = sample.status, sample.rewards
        is_first = gave(self.evidence.scores.get(known), status, rewards)
        if is_first or self._is_as_given(self.evidence.scores_of(known), status, rewards, ids):
            del self.evidence.scores[known]
            self.evidence.more_scores.pop(known, None)

    def compared(self, line: Line) -> None:
        """The verdict of a group is one that the reward gave (I10)."""
        name, uid, attempt = line["reward_actor"], line["uid"], line["attempt"]
        told = (line["status"], tuple(line.get("rewards", ())))
        given = self.evidence.groups.get((uid, attempt), set())
        if name in self.evidence.rewards and told not in given:
            text = f"a verdict of a group reaches the head as it was given: {told}, of {name}: {sorted(given)[:2]}"
            self.file.add("I10", text, uid=uid, attempt=attempt)

    def evaluated(self, line: Line) -> None:
        """A verdict of an evaluation."""
        known = (line["evaluation"], line["uid"], line["sample"], line["attempt"])
        ids = {"uid": line["uid"], "sample": line["sample"], "attempt": line["attempt"]}
        made = self.evidence.answers.get(known)
        told = (line["n_tokens"], line["finish"], line["min_version"], line["max_version"])
        if made is not None and made.told != told:
            rule = "n_tokens, finish, min_version and max_version are those of the completion"
            self.file.add("I5", f"{rule}: {made.told}, not {told}", **ids)
        rewards = line["reward"], role_rewards_of(line)
        if self._is_as_given(self.evidence.evaluated.get(known, ()), line["status"], rewards, ids):
            del self.evidence.evaluated[known]

    def _of_this_history(self, known: int, sample: AcceptedSample, term: int, ids: Mapping[str, int]) -> None:
        """Versions of an older term count only up to the version where the next term began (I6)."""
        made_in = self.evidence.made_in(known)
        base = self.evidence.terms.base(after=made_in, to=term)
        if known in self.evidence.completions and base is not None and sample.newest > base:
            rule = f"of what term {made_in} made, versions up to {base} count in term {term}"
            self.file.add("I6", f"{rule}: it has tokens of version {sample.newest}", **ids)

    def _as_made(self, known: int, line: Line, sample: AcceptedSample, ids: Mapping[str, int]) -> None:
        """A scored sample equals the sample that the lease's holder completed (I5)."""
        made = self.evidence.completions.get(known)
        if made is None:
            if sample.holder in self.evidence.generators:
                self.file.add("I5", f"missing completion of {sample.holder}, the generator of this sample", **ids)
            return
        if sample.holder and made.maker != sample.holder:
            text = f"a sample is made by its holder: {made.maker} completed it, not {sample.holder}"
            self.file.add("I6", text, **ids)
        told = (sample.n_tokens, sample.finish, line["min_version"], line["max_version"])
        if told != made.told:
            rule = "n_tokens, finish, min_version and max_version are those of the completion"
            self.file.add("I5", f"{rule}: {made.told}, not {told}", **ids)

    def _is_as_given(
        self, scores: Sequence[ScoreRecord], status: str, rewards: Rewards, ids: Mapping[str, int]
    ) -> bool:
        """The head's verdict equals the verdict that a reward gave (I10)."""
        if any(gave(score, status, rewards) for score in scores):
            return True
        reward = ", ".join([str(rewards[0]), *(f"{role} {value}" for role, value in rewards[1].items())])
        if scores:
            given = f"{scores[0].status} {scores[0].reward} at {scores[0].where}"
            self.file.add("I10", f"a verdict reaches the head as it was given: {status} {reward}, {given}", **ids)
        elif self.without_a_file or not self.evidence.rewards:
            self.n_unheard += 1
        else:
            self.file.add("I10", f"a verdict is given by a reward: none says that it gave {status} {reward}", **ids)
        return False

    def sampled(self, line: Line, prompt: AuditedPrompt | None, *, n_admitted: int) -> None:
        """A generator's report of a completed sample, perhaps late: lease and sample match its own lines."""
        uid, number, attempt = line["uid"], line["sample"], line["attempt"]
        made = self.evidence.completions.get(key(uid, number, attempt))
        newest = attempt if prompt is None else prompt.attempt
        if not 0 <= uid < n_admitted:
            broken = ("I3", f"only an admitted prompt is sampled: {n_admitted} were")
        elif newest is None or attempt != newest:
            broken = ("I6", f"what is leased is sampled: attempt {attempt}, leased is {newest}")
        elif prompt is not None and attempt == newest and not 0 <= number < prompt.n:
            broken = ("I8", f"unknown sample {number}: a group has samples 0..{prompt.n - 1}")
        elif made is not None and made.n_tokens != line["n_tokens"]:
            broken = ("I12", f"tokens sampled are those of the completion: {made.n_tokens}, not {line['n_tokens']}")
        elif made is None and prompt is not None and attempt == newest and prompt.holder in self.evidence.generators:
            broken = ("I5", f"missing completion of {prompt.holder}, the generator of this sample")
        else:
            return
        self.file.add(*broken, uid=uid, sample=number, attempt=attempt)

    def train(self, line: Line, *, is_undone: bool) -> None:
        """A trajectory of a batch equals its generator's sample (I5). After a rollback it may be trained again."""
        uid, number = line["uid"], line["sample"]
        known, completions = key(uid, number, line["attempt"]), self.evidence.completions
        made = completions.get(known) if is_undone else completions.pop(known, None)
        if made is not None and list(made.versions) != line["versions"]:
            rule = "versions are stamped where the token is made"
            text = f"{rule}: {line['versions']}, its generator says {list(made.versions)}"
            self.file.add("I5", text, uid=uid, sample=number)

    def forget(self, uid: int, samples: Mapping[int, AcceptedSample]) -> None:
        """Forget these completions: their outcome is known."""
        for number, sample in samples.items():
            self.evidence.completions.pop(key(uid, number, sample.attempt), None)

    def refuse(self, line: Line) -> None:
        self.refused[line["what"]] += 1
        is_result = line["what"] != "Partial"
        if is_result and "uid" in line and "sample" in line and len(self._refused_samples) < KEPT_REFUSALS:
            self._refused_samples.add(key(line["uid"], line["sample"], line.get("attempt", 0)))

    def unleased(self) -> None:
        """Every request of a generator is of a lease by the head (I6)."""
        for (uid, attempt), work in self.evidence.work.items():
            if not work.is_leased:
                text = f"a generator samples what the head leased: {work.maker} began what was not"
                self.file.findings.add("I6", work.where, text, uid=uid, attempt=attempt)

    def lost_verdicts(self, prompts: Prompts, *, before: float) -> None:
        """A reward's verdict on a prompt not refunded is accepted or rejected, never lost (I9), but in older terms."""
        state = prompts.state
        for known, score in self.evidence.scores.items():
            uid, attempt = uid_of(known), attempt_of(known)
            is_awaited = attempt >= prompts.first_attempt and uid < len(state) and state[uid] != REFUNDED
            until = min(before, self.evidence.cut.get(score.where.partition(".jsonl")[0], before))
            if score.wall < until - LAST_S and is_awaited and not self._is_refused(known):
                text = "nobody drops in silence: this verdict was neither accepted nor refused by the head"
                ids = {"uid": uid, "sample": sample_of(known), "attempt": attempt}
                self.file.findings.add("I9", score.where, text, **ids)

    def _is_refused(self, known: int) -> bool:
        return known in self._refused_samples or len(self._refused_samples) >= KEPT_REFUSALS


def gave(score: ScoreRecord | None, status: str, rewards: Rewards) -> bool:
    """Whether the head's verdict is this one."""
    if score is None or score.status != status:
        return False
    return status != "value" or (score.reward, score.role_rewards) == rewards


def in_words(trained: tuple[float, str, list[float]]) -> str:
    reward, roles, rewards = trained
    return f"{reward} ({roles}: {rewards})" if roles else str(reward)


def as_scored(
    file: JournalFile, line: Line, sample: AcceptedSample, rewards: tuple[float, str, list[float]], *, has_reward: bool
) -> None:
    """A trajectory of a batch equals its `scored` line; `has_reward`: own or declared; `rewards`: of it and its roles,
    or of its group.
    """
    told = line["reward"], line.get("roles", ""), line.get("rewards", [])
    ids = {"uid": line["uid"], "sample": line["sample"]}
    if not has_reward:
        text = f"a {sample.status} is no number: it is trained with reward {line['reward']}"
        file.add("I10", text, **ids)
    elif told != rewards:
        text = f"a trajectory is trained with its verdict: {in_words(rewards)}, not {in_words(told)}"
        file.add("I10", text, **ids)
    if line["finish"] != sample.finish:
        file.add("I5", f"a trajectory ends as it was received: {sample.finish}, not {line['finish']}", **ids)
    if line["n_tokens"] != sample.n_tokens:
        text = f"tokens trained are tokens received: {sample.n_tokens}, not {line['n_tokens']}"
        file.add("I12", text, **ids)
    if line["attempt"] != sample.attempt:
        file.add("I6", f"attempt {line['attempt']} is trained, attempt {sample.attempt} was accepted", **ids)
