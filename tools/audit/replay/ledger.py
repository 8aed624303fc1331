"""Tracks each prompt from admission to its end and checks each refund: records of open ones, a byte of others."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import NO_ROLES, role_rewards_of
from tools.audit.replay.clock import Clock
from tools.audit.replay.data_passes import FAR, MOST_AGAIN, Passes, Row
from tools.audit.replay.terms import TermLog

MOST_SAMPLES = 1 << 16  # of a group: a damaged journal must not make us allocate more
ANY_TIME = ("sampling_error", "prompt_too_long", "poison", "lost_timeline", "no_signal")  # its other rules are below


def why_not(reason: str, *, born: int, failed: str, clock: Clock) -> tuple[str, str] | None:
    """The invariant that this refund breaks, and the rule; None if the refund is valid. `failed`: its bad verdict."""
    setup, u = clock.setup, clock.u
    if failed:
        if reason == f"reward_{failed}":
            return None
        return "I10", f"a {failed} refunds its group as reward_{failed}: {reason}"
    if reason in ("reward_timeout", "reward_error"):
        return "I10", f"a group is refunded as {reason} after such a verdict: it had none"
    if reason == "too_old":
        if setup.policy not in (None, "drop"):
            return "I3", f"only under drop is a group too old: the policy is {setup.policy}"
        if setup.eta is not None and u - born <= setup.eta:
            return "I3", f"a group is too old when u - born > eta = {setup.eta}: {u} - {born} = {u - born}"
    elif reason == "end_of_run":
        ends = setup.stops_early or u in setup.earlier_totals
        if setup.total_steps is not None and u < setup.total_steps and not ends:
            return "I3", f"the run ends with update {setup.total_steps}: this is the end at update {u}"
    elif reason != "end_of_data" and reason not in ANY_TIME:
        return "I3", f"unknown reason of a refund: {reason!r}; docs/journal.md has the list"
    return None


OPEN, TRAINING, TRAINED, REFUNDED = range(4)
WORDS = {OPEN: "open", TRAINING: "in training", TRAINED: "trained", REFUNDED: "refunded"}
LEAST = 2  # samples with a reward in a group that is short by reward.partial_groups
AGAIN = frozenset({"too_old", "lost_timeline"})  # refunds after which a row may be drawn again in the same pass


class AcceptedSample(NamedTuple):
    """One accepted verdict."""

    status: str
    reward: float
    n_tokens: int
    finish: str
    attempt: int
    holder: str
    newest: int  # version among its tokens; -1 when it has none
    correct: bool | None = None
    roles: str = ""  # of the episode's trajectories
    role_rewards: Mapping[str, float] = NO_ROLES

    @property
    def rewards(self) -> tuple[float, Mapping[str, float]]:
        return self.reward, self.role_rewards


@dataclass(slots=True)
class AuditedPrompt:
    """An admitted prompt, until the learner gets it or it is refunded."""

    uid: int
    born: int
    row: Row
    n_before: int  # times its row was drawn before, in its pass
    n: int = 0  # samples of its group, by its first lease
    attempt: int | None = None  # None until it is leased
    holder: str = ""
    is_queued: bool = False  # its lease was lost
    may_return: bool = False  # leased since before the term: its holder may return it
    is_ready: bool = False
    failed: str = ""  # status of a verdict without a reward: a refund must follow
    scored: dict[int, AcceptedSample] = field(default_factory=dict)
    earlier: list[tuple[int, AcceptedSample]] = field(default_factory=list)  # verdicts that were lost in rollbacks
    sampled: set[tuple[int, int]] = field(default_factory=set)  # (attempt, sample) that left their generators
    left: int | None = None  # the clock's moment at which it was taken or refunded
    reason: str = ""  # of its refund
    asked: str = ""  # the reward that compares its samples, or has
    group: dict[int, float] | None = None  # rewards by sample, by reward.group; None: it is not compared
    groups: dict[frozenset[tuple[int, int]], dict[int, float]] = field(default_factory=dict)  # by (sample, attempt)

    @property
    def n_tokens(self) -> int:
        return sum(sample.n_tokens for sample in self.scored.values())

    def n_scored(self, attempt: int, sample: int) -> int | None:
        """The tokens with which a sample of this attempt was scored; None: it was not."""
        found = self.scored.get(sample)
        return found.n_tokens if found is not None and found.attempt == attempt else None

    @property
    def attempts(self) -> frozenset[tuple[int, int]]:
        """Sample and attempt of each verdict."""
        return frozenset((number, sample.attempt) for number, sample in self.scored.items())

    def reward_of(self, number: int) -> float:
        """The reward that the sample is trained with. A failed one keeps its declared reward (I10)."""
        sample = self.scored[number]
        return self.group[number] if self.group is not None and sample.status == "value" else sample.reward

    def trained_with(self, number: int) -> tuple[float, str, list[float]]:
        """The sample's reward, its roles, and the reward of each of their trajectories."""
        sample, reward = self.scored[number], self.reward_of(number)
        own = sample.role_rewards if self.group is None else {}
        return reward, sample.roles, [own.get(role, reward) for role in sample.roles.split()]


class Prompts:
    """Admit, lease, score, ready, take, refund. Each method takes a line and reports the rules that it breaks."""

    def __init__(self, file: JournalFile, clock: Clock, terms: TermLog) -> None:
        self.file, self.clock, self.terms = file, clock, terms
        self.passes = Passes(file, clock.setup)
        self.open: dict[int, AuditedPrompt] = {}
        self.closed: dict[int, AuditedPrompt] = {}  # closed prompts that a later term opens again
        self.state = bytearray()  # by uid
        self.left = (array("q"), array("q"))  # moments and uids of all closed prompts, in the order of their ends
        self.first_attempt = 0  # of the term
        self.refunds: Counter[str] = Counter()
        self.n_refilled = 0  # refunds as no_signal since the last batch or term
        self.is_at_the_end = False  # a prompt was refunded as end_of_data in this term
        self.n_ready = 0
        # closed prompts -> (attempt, sample) without `sampled` -> tokens of the verdict
        self._unsent: dict[int, dict[tuple[int, int], int | None]] = {}
        self._by_age: list[tuple[int, int]] = []  # heap of (born, uid) of the ready prompts, and of some former ones
        self.n_queued = 0
        self.n_leases = 0
        self.n_values = self.n_failed = 0  # verdicts accepted

    # admission and leases

    def admit(self, line: Line) -> None:
        uid = line["uid"]
        if uid != len(self.state):
            self.file.add("I3", f"uids count admissions 0, 1, 2, ...: {len(self.state)} is next, not {uid}", uid=uid)
            if not len(self.state) < uid < len(self.state) + FAR:
                return
            self.state.extend([REFUNDED] * (uid - len(self.state)))
        row = (line.get("source", ""), line["epoch"], line["row"])
        n_before = self.passes.draw(row, uid, line.get("row_digest", ""))
        if self.is_at_the_end and not n_before:
            self.file.add("I3", f"after end_of_data no new row comes: row {row[2]} of pass {row[1]}", uid=uid)
        if (issue := line.get("issue", n_before)) != n_before:
            self.file.add("I4", f"issue counts the draws of a row before: {n_before}, not {issue}", uid=uid)
        self.state.append(OPEN)
        self.open[uid] = AuditedPrompt(uid, line["born"], row, n_before)

    def lease(self, line: Line) -> AuditedPrompt | None:
        """The first lease of a prompt, or the next attempt after a lost lease."""
        uid, attempt = line["uid"], line["attempt"]
        self.n_leases += 1
        prompt = self.of(line, "I3", "only a live prompt is leased")
        if prompt is None:
            return None
        expected = self.first_attempt
        if prompt.attempt is None:
            prompt.n = line["n"]
            if prompt.n not in (sizes := self.clock.setup.group_sizes(prompt.row[0])) and sizes:
                told = ", ".join(map(str, sizes))
                self.file.add("I8", f"a group has gconfig.n_samples = {told} samples: {prompt.n}", uid=uid)
        else:
            expected = max(prompt.attempt + 1, expected)
            if not prompt.is_queued and not prompt.may_return:
                text = f"only a lost lease is leased again: {prompt.holder or 'nobody'} holds it"
                self.file.add("I3", text, uid=uid)
        if attempt != expected:
            self.file.add("I6", f"attempts count the leases of a prompt: {expected} is next, not {attempt}", uid=uid)
        if line["n"] != prompt.n - len(prompt.scored):
            missing = prompt.n - len(prompt.scored)
            self.file.add("I8", f"a lease is for all samples without a verdict: {missing}, not {line['n']}", uid=uid)
        if line["born"] != prompt.born:
            self.file.add("I7", f"born stays what it was at admission: {prompt.born}, not {line['born']}", uid=uid)
        self.n_queued -= prompt.is_queued
        prompt.is_queued = prompt.may_return = False
        prompt.attempt, prompt.holder = attempt, line["holder"]
        return prompt

    def lose(self, holder: str) -> None:
        """Their holder has died: these prompts wait for another lease."""
        for prompt in self.open.values():
            if prompt.holder == holder and not prompt.is_ready and not prompt.is_queued:
                prompt.is_queued = True
                prompt.holder = ""
                self.n_queued += 1

    def unsampled(self, line: Line) -> None:
        """Its holder failed at a prompt, which waits for another lease."""
        prompt = self.of(line, "I3", "only a live prompt is given to another generator")
        if prompt is None:
            return
        if prompt.is_queued or prompt.holder != line["holder"] or prompt.attempt != line["attempt"]:
            text = f"only its holder fails at a prompt: {prompt.holder or 'nobody'} at attempt {prompt.attempt}"
            self.file.add("I6", text, uid=prompt.uid, attempt=line["attempt"])
        self.n_queued += not prompt.is_queued
        prompt.is_queued, prompt.holder = True, ""

    def sampled(self, line: Line) -> None:
        """Each sample of an attempt leaves its generator once, with the tokens that are scored."""
        uid, sent = line["uid"], (line["attempt"], line["sample"])
        prompt = self.open.get(uid)
        if prompt is not None:
            is_again = sent in prompt.sampled
            prompt.sampled.add(sent)
            n_tokens = prompt.n_scored(*sent)
        else:
            unsent = self._unsent.get(uid, {})
            is_again = sent[0] >= self.first_attempt and sent not in unsent
            n_tokens = unsent.pop(sent, None)
        if is_again:
            self.file.add("I4", "a sample is sent once: it was before", uid=uid, sample=sent[1])
        elif n_tokens not in (None, line["n_tokens"]):
            text = f"tokens sampled are those of the verdict: {n_tokens}, not {line['n_tokens']}"
            self.file.add("I12", text, uid=uid, sample=sent[1])

    # verdicts

    def score(self, line: Line) -> AcceptedSample | None:
        """One verdict that the head accepted: for the open attempt, once a sample (I4, I6)."""
        uid, sample, attempt, status = line["uid"], line["sample"], line["attempt"], line["status"]
        ids = {"uid": uid, "sample": sample, "attempt": attempt}
        prompt = self.of(line, "I6", "only an open prompt's results are accepted")
        if prompt is None:
            return None
        if prompt.attempt != attempt or prompt.is_queued:
            state = "queued" if prompt.is_queued else "leased"
            text = f"an older attempt's results are refused: attempt {attempt}, {state} is {prompt.attempt}"
            self.file.add("I6", text, **ids)
        if sample in prompt.scored:
            self.file.add("I4", "a sample is scored once: it was before", **ids)
        if not 0 <= sample < prompt.n:
            self.file.add("I8", f"a group has samples 0..{prompt.n - 1}: {sample}", **ids)
        newest = line.get("max_version")
        new = AcceptedSample(
            status, line["reward"], line["n_tokens"], line["finish"], attempt, prompt.holder,
            -1 if newest is None else newest, line.get("correct"), line.get("roles", ""), role_rewards_of(line),
        )  # fmt: skip
        prompt.scored[sample] = new
        if status == "value":
            self.n_values += 1
            if not abs(new.reward) < float("inf"):
                self.file.add("I10", f"a reward is a number when its status is value: {new.reward}", **ids)
        elif status in ("timeout", "error"):
            self.n_failed += 1
            self._fail(prompt, new, ids)
        else:
            self.file.add("I10", f"a verdict is value, timeout or error: {status!r}", **ids)
        return new

    def _fail(self, prompt: AuditedPrompt, sample: AcceptedSample, ids: dict[str, int]) -> None:
        """A timeout or an error gets the declared reward, is left out of its group, or ends the group (I10)."""
        setup, status = self.clock.setup, sample.status
        declared = setup.declared(status)
        if declared is not None:
            if sample.reward != declared:
                text = f"a {status} has the reward of reward.on_{status}, {declared:g}: {sample.reward}"
                self.file.add("I10", text, **ids)
        elif not setup.partial_groups or prompt.n - len(self.left_out(prompt)) < LEAST:
            prompt.failed = status

    def left_out(self, prompt: AuditedPrompt) -> dict[int, AcceptedSample]:
        """The verdicts that have neither a reward nor a declared one."""
        return {number: sample for number, sample in prompt.scored.items() if not self.has_reward(sample)}

    def has_reward(self, sample: AcceptedSample) -> bool:
        return sample.status == "value" or self.clock.setup.declared(sample.status) is not None

    def compare(self, line: Line) -> None:
        """A complete group goes to a reward, again only after that reward was lost."""
        prompt = self.of(line, "I3", "only a live prompt is compared")
        if prompt is None:
            return
        if len(prompt.scored) != prompt.n or prompt.is_ready or prompt.failed:
            text = f"a group is compared when it is complete, and once: {len(prompt.scored)} of {prompt.n} verdicts"
            self.file.add("I8", text, uid=prompt.uid)
        prompt.asked = line["reward_actor"]

    def compared(self, line: Line) -> None:
        """The verdict of a group: once, of all its samples, by the reward that was asked (I4, I6, I8)."""
        prompt = self.of(line, "I6", "only an open prompt's group is compared")
        if prompt is None:
            return
        status, rewards = line["status"], line.get("rewards", [])
        with_reward = [number for number, sample in sorted(prompt.scored.items()) if self.has_reward(sample)]
        if prompt.group is not None:
            self.file.add("I4", "a group is compared once: it was before", uid=prompt.uid)
        if (line["reward_actor"], line["attempt"]) != (prompt.asked, prompt.attempt):
            text = f"a group is compared by the reward that was asked: {prompt.asked or 'none'}, {prompt.attempt}"
            self.file.add("I6", text, uid=prompt.uid, attempt=line["attempt"])
        if status == "value" and (len(prompt.scored) != prompt.n or len(rewards) != len(with_reward)):
            text = f"a group has a reward for each of its {len(with_reward)} samples: it has {len(rewards)}"
            self.file.add("I8", text, uid=prompt.uid)
        elif status == "value":
            prompt.group = prompt.groups[prompt.attempts] = dict(zip(with_reward, rewards, strict=True))
        else:
            prompt.failed = status

    def ready(self, line: Line) -> None:
        prompt = self.of(line, "I3", "only a live prompt gets ready")
        if prompt is None:
            return
        if len(prompt.scored) != prompt.n:
            text = f"a group is ready with its last verdict: {len(prompt.scored)} of {prompt.n}"
            self.file.add("I8", text, uid=prompt.uid)
        if self.clock.setup.compares and prompt.group is None:
            self.file.add("I8", "with reward.group a group is ready when it is compared: it was not", uid=prompt.uid)
        if prompt.failed:
            text = f"a {prompt.failed} is no number: its group is refunded, never ready"
            self.file.add("I10", text, uid=prompt.uid)
        missing = sorted(self.left_out(prompt))
        if line.get("missing", []) != missing and not prompt.failed:
            text = f"a short group names the samples that it goes without: {missing}, not {line.get('missing', [])}"
            self.file.add("I8", text, uid=prompt.uid)
        self.n_ready += not prompt.is_ready
        prompt.is_ready = True
        heappush(self._by_age, (prompt.born, prompt.uid))

    # batches and refunds

    def take(self, line: Line) -> AuditedPrompt | None:
        """First trajectory line of a group: its prompt moves from ready to training."""
        uid = line["uid"]
        if 0 <= uid < len(self.state) and self.state[uid] in (TRAINING, TRAINED):
            text = f"no trajectory is trained twice: its prompt is {WORDS[self.state[uid]]}"
            self.file.add("I4", text, uid=uid, sample=line["sample"])
            return None
        prompt = self.of(line, "I3", "only a live prompt is trained")
        if prompt is None:
            return None
        if not prompt.is_ready:
            text = f"a batch holds whole groups: {len(prompt.scored)} of {prompt.n} samples have a verdict"
            self.file.add("I8", text, uid=uid)
        oldest = self._oldest()
        if oldest is not None and oldest != (prompt.born, uid):
            text = f"the oldest whole group is trained first: {oldest[1]}, born {oldest[0]}, not born {prompt.born}"
            self.file.add("I8", text, uid=uid)
        self.state[uid] = TRAINING
        self._learn(prompt)
        self._leave(prompt)
        return prompt

    def trained(self, uid: int) -> None:
        self.state[uid] = TRAINED

    def refund(self, line: Line) -> AuditedPrompt | None:
        prompt = self.of(line, "I3", "only a live prompt is refunded")
        if prompt is None:
            return None
        reason = prompt.reason = line["reason"]
        self.state[prompt.uid] = REFUNDED
        self._leave(prompt)
        if prompt.uid not in self.closed:
            self.refunds[reason] += 1
        broken = why_not(reason, born=prompt.born, failed=prompt.failed, clock=self.clock)
        if broken is not None:
            self.file.add(*broken, uid=prompt.uid)
        if reason == "no_signal":
            self._learn(prompt)
            self._refill(prompt)
        self.is_at_the_end |= reason == "end_of_data"
        if line["n_tokens_dropped"] != prompt.n_tokens:
            text = f"dropped tokens are those received: {prompt.n_tokens}, not {line['n_tokens_dropped']}"
            self.file.add("I12", text, uid=prompt.uid)
        self._check_refund(line, prompt)
        if line.get("again", reason in AGAIN):
            self.passes.release(prompt.row)
        return prompt

    def _check_refund(self, line: Line, prompt: AuditedPrompt) -> None:
        """What a refund says of its prompt; journals of older runs say less."""
        expected = {
            "n_scored": len(prompt.scored),
            "age": self.clock.u - prompt.born,
            "again": line["reason"] == "too_old" and prompt.n_before < MOST_AGAIN,
        }
        for name, value in expected.items():
            if line.get(name, value) != value:
                text = f"{name} of a refund follows from the lines before: {value}, not {line[name]}"
                self.file.add("I12" if name == "n_scored" else "I3", text, uid=prompt.uid)

    def _learn(self, prompt: AuditedPrompt) -> None:
        """A curriculum counts the right samples of the group."""
        judged = [s.correct for s in prompt.scored.values() if self.has_reward(s) and s.correct is not None]
        self.passes.learn(prompt.row, sum(judged), len(judged))

    def _refill(self, prompt: AuditedPrompt) -> None:
        """A complete group with equal rewards, of at most data.max_refill for a batch (I3)."""
        self.n_refilled += 1
        most = self.clock.setup.max_refill
        trained = [prompt.trained_with(number) for number, sample in prompt.scored.items() if self.has_reward(sample)]
        by_role = [zip(roles.split(), own, strict=True) if roles else [("", one)] for one, roles, own in trained]
        rewards = {pair for pairs in by_role for pair in pairs}
        if not prompt.is_ready or len(rewards) != max(1, len({role for role, _ in rewards})):
            text = f"a group without signal is complete and has equal rewards: {len(rewards)} different ones"
            self.file.add("I3", text, uid=prompt.uid)
        if most is not None and self.n_refilled > most:
            text = f"at most data.max_refill = {most} groups are replaced for a batch: this is number {self.n_refilled}"
            self.file.add("I3", text, uid=prompt.uid)

    def close(self, *, ended: bool) -> None:
        """After a normal end nothing is open."""
        self.passes.close()
        if not ended:
            return
        for uid in list(self.open)[:100]:
            self.file.add("I3", "at the end every prompt is trained or refunded: this one is open", uid=uid)
        for uid, state in enumerate(self.state):
            if state == TRAINING:
                self.file.add("I3", "at the end every prompt is trained or refunded: no update took it in", uid=uid)

    def sort(self) -> None:
        """A term began, with another set of open prompts."""
        ready = [prompt for prompt in self.open.values() if prompt.is_ready]
        self._by_age = sorted((prompt.born, prompt.uid) for prompt in ready)
        self.n_ready = len(ready)
        self._unsent.clear()
        self.n_refilled = 0
        self.n_queued = sum(prompt.is_queued for prompt in self.open.values())

    # helpers

    def _oldest(self) -> tuple[int, int] | None:
        """Born and uid of the oldest ready prompt."""
        while self._by_age:
            prompt = self.open.get(self._by_age[0][1])
            if prompt is not None and prompt.is_ready:
                return self._by_age[0]
            heappop(self._by_age)
        return None

    def of(self, line: Line, invariant: str, rule: str) -> AuditedPrompt | None:
        """The open prompt of a line, or a finding."""
        uid = line["uid"]
        prompt = self.open.get(uid)
        if prompt is None:
            known = WORDS[self.state[uid]] if 0 <= uid < len(self.state) else "never admitted"
            self.file.add(invariant, f"{rule}: prompt {uid} is {known}", uid=uid)
        return prompt

    def _leave(self, prompt: AuditedPrompt) -> None:
        self.n_ready -= prompt.is_ready
        self.n_queued -= prompt.is_queued
        del self.open[prompt.uid]
        prompt.left = self.clock.moment
        if prompt.attempt is not None and prompt.n <= MOST_SAMPLES:
            unsent = {(prompt.attempt, sample) for sample in range(prompt.n)} - prompt.sampled
            if unsent:
                self._unsent[prompt.uid] = {sent: prompt.n_scored(*sent) for sent in unsent}
        for column, value in zip(self.left, (prompt.left, prompt.uid), strict=True):
            column.append(value)
        if self.terms.undo_prompt(prompt.uid):
            self.closed[prompt.uid] = prompt
