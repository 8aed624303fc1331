"""The witness: an independent count of a simulated ring, compared with the head's reports.

It uses no counter of the head. It counts journal lines itself, and takes versions and rewards from the actors that
made them.
"""

from collections import Counter
from typing import Any

from areal_bus import messages as m
from areal_bus.core.effects import Divide, Effect, Record, Save, Send
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.transitions.guest_leases import TIMED_OUT
from areal_bus.messages import Role
from areal_bus.trajectories import split, within
from areal_lab.staleness.simulator.generator import NO_REASON, SimulatedGenerator, episode
from areal_lab.staleness.simulator.learner import MODEL, Learners
from areal_lab.staleness.simulator.reward import SimulatedReward
from areal_lab.staleness.simulator.sample import SimulatedReport, SimulatedSample, begins_with, report_number
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.sources import ExpectedRows, Key, Learned
from areal_lab.staleness.simulator.witness_records import Excuses, Followed, Pushed, Violation
from areal_lab.staleness.simulator.witness_rollback import go_back

WATCHED = {m.ShardItem, m.Partial, m.PushBegin}  # messages of the head


class Witness:
    """`see` gets every effect of the head, `trained` every trajectory a learner rank trains."""

    def __init__(self, scenario: Scenario, head: Head) -> None:
        self.scenario = scenario
        self.head = head
        self.violations: list[Violation] = []
        self.n_checks: Counter[str] = Counter()
        self.generators: dict[str, SimulatedGenerator] = {}
        self.rewards: list[SimulatedReward] = []
        self.reports: list[SimulatedReport] = []  # of unfinished samples, by generators
        self._handed_on: dict[
            tuple[int, int, int], SimulatedReport
        ] = {}  # uid, sample, attempt -> the report that its holder continues
        self.prompts: dict[int, Followed] = {}
        self.now = 0.0
        self.u = self.v = 0
        self.n_live = 0
        self.taken: dict[int, set[int]] = {}  # batch -> its prompts, until published
        self.update_of: dict[int, set[int]] = {}  # batch -> its prompts, until trained
        self.rows: dict[Key, str] = {}  # (source, epoch, row) -> open, trained, refunded, again
        self.learned: dict[int, Learned] = {}  # uid -> what a curriculum learned, in the surviving history, in order
        self._expected = ExpectedRows(scenario.sources, scenario.window, seed=scenario.seed)
        self.groups: dict[int, dict[int, set[int]]] = {}  # step -> uid -> samples sent to learners
        self.named: dict[int, set[tuple[int, int]]] = {}  # step -> (uid, sample) that its journal line leaves out
        self.samples_trained: set[tuple[int, int]] = set()
        self.n_refilled = 0  # groups without signal that were replaced since the last batch or term
        self.is_refilled = True  # the last batch may have groups without signal
        self.whole: set[tuple[int, int]] = set()  # born and uid of live prompts whose samples all have a value
        self.saved: dict[int, dict[int, dict[int, int]]] = {}  # version -> uid -> samples accepted when it was saved
        self.is_same_head = True  # since the last term, or the beginning
        self.handed_over: int | None = None  # version at which the split changed, until learners begin with it
        self.n_terms = 0
        self._max_reissues = scenario.rules.max_reissues
        self.n_masked = 0  # tokens handed to learners that are too old to be trained
        self.n_undone = 0  # prompts that were trained, and are not in the surviving history
        self.handed: set[tuple[int, int, int]] = set()  # (step, uid, sample) sent to learners in this term
        self._leased: set[tuple[int, int]] = set()  # (uid, attempt) of all terms
        self.weights: dict[int, str] = {0: MODEL}  # version -> which weights, in the surviving history
        self.learners: Learners | None = None
        self._push: m.PushBegin | None = None  # the last one
        self.pushed = Pushed()
        self.excuses = Excuses(scenario, self.pushed)
        self._handlers = {
            Event.TERM: lambda line: go_back(self, line),
            Event.ADMIT: self._on_admit,
            Event.LEASE: self._on_lease,
            Event.SCORED: self._on_scored,
            Event.COMPARED: self._on_compared,
            Event.REFUND: self._on_refund,
            Event.UNSAMPLED: self._on_unsampled,
            Event.BATCH: self._on_batch,
            Event.TRAJECTORY: self._on_trajectory,
            Event.UPDATE: self._on_update,
            Event.PUBLISH: self._on_publish,
            Event.READY: self.excuses.on_ready,
            Event.JOINED: self._on_joined,
            Event.MEMBER: self._on_member,
            Event.PUSH: self.pushed.on_push,
        }

    def see(self, effect: Effect) -> None:
        if type(effect) is Record:
            handler = self._handlers.get(effect.event)
            if handler is not None:
                handler(effect.fields)
        elif type(effect) is Send and type(effect.message) in WATCHED:
            self._on_send(effect.to, effect.message)
        elif isinstance(effect, Save | Divide):
            live = ((uid, prompt) for uid, prompt in self.prompts.items() if prompt.state == "live")
            self.saved[effect.checkpoint.version] = {uid: dict(prompt.accepted) for uid, prompt in live}
            if type(effect) is Divide:
                self.handed_over = effect.checkpoint.version

    def _on_joined(self, line: dict[str, Any]) -> None:
        is_gone = line["name"].rpartition(".")[0] in self.excuses.gone
        self.check("I6", not is_gone, "{} joins after it was evicted for good", line["name"])
        self.pushed.on_joined(line)

    def _on_member(self, line: dict[str, Any]) -> None:
        self.excuses.on_member(line)
        self.pushed.on_member(line)

    def _on_send(self, to: str, message: m.Message) -> None:
        if isinstance(message, m.ShardItem):
            self._on_shard_item(message)
        elif isinstance(message, m.Partial):
            self._on_partial(to, message)
        elif isinstance(message, m.PushBegin) and message is not self._push:
            self._push = message
            self._on_push(message)

    def check(self, invariant: str, holds: bool, what: str, *values: object, uid: int | None = None) -> None:
        """`what` is formatted with the values only on a violation, because a schedule makes hundreds of checks."""
        self.n_checks[invariant] += 1
        if not holds:
            self.violations.append(Violation(invariant, what.format(*values), self.now, uid))

    def follow(self, head: Head) -> None:
        """The head was replaced by this one."""
        self.head = head
        self.is_same_head = False
        self.pushed.restart()

    def hear(self, sender: str, done: m.PushDone) -> None:
        """Read a report of the root about its part in a push."""
        if sender.startswith(Role.LEARNER) and done.digest == self.weights.get(done.version):
            self.pushed.on_root_done(done)

    def begin_term(self, version: int, *, n_live: int) -> None:
        """Reset to this version: nothing is in training, and no member has a later version."""
        self.u = self.v = version
        self.n_live = n_live
        self.taken, self.update_of, self.groups, self.handed, self.named = {}, {}, {}, set(), {}
        self.weights = {other: weights for other, weights in self.weights.items() if other <= version}
        self.n_refilled = 0
        self.excuses.begin_term()
        self.pushed.begin_term(version)

    # prompts

    def _on_admit(self, line: dict[str, Any]) -> None:
        uid, scenario = line["uid"], self.scenario
        self.n_live += 1
        in_training = sum(len(prompts) for prompts in self.taken.values())
        limit = (scenario.eta + 1) * scenario.batch_size
        backlog = self.n_live + in_training
        self.check("I1", backlog <= limit, "{} live + {} in training over {}", self.n_live, in_training, limit, uid=uid)
        told = line["live"] + line["in_training"]
        self.check(
            "I1", told == backlog, "the journal says {} live or in training, there are {}", told, backlog, uid=uid
        )
        row = (line.get("source", ""), line["epoch"], line["row"])
        known = self.rows.get(row)
        self.check(
            "I4", known == ("again" if line["issue"] else None), "row {} is issued while it is {}", row, known, uid=uid
        )
        if not line["issue"]:
            self.check("I4", row == (due := self._next_row()), "row {} is issued, {} is next", row, due, uid=uid)
        self.check(
            "I4",
            line["issue"] <= self._max_reissues,
            "row {} is issued again {} times",
            row,
            line["issue"],
            uid=uid,
        )
        self.rows[row] = "open"
        self.check("I3", uid == len(self.prompts), "prompt {} follows {}", uid, len(self.prompts) - 1, uid=uid)
        self.prompts[uid] = Followed(line["born"], row, issue=line["issue"])
        self._count()

    def _next_row(self) -> Key:
        """The row that a new prompt must have."""
        if not self.scenario.sources:
            return "", 0, len(self.rows)
        return self._expected.next(self.rows, list(self.learned.values()))

    def _of(self, uid: int) -> Followed:
        """The record of a prompt that the head names."""
        prompt = self.prompts.get(uid)
        self.check("I3", prompt is not None, "it was never admitted", uid=uid)
        return prompt if prompt is not None else Followed(0, ("", 0, 0))

    def _on_lease(self, line: dict[str, Any]) -> None:
        uid, holder = line["uid"], line["holder"]
        prompt = self._of(uid)
        prompt.attempt = line["attempt"]
        prompt.n_leases += 1
        is_new = (uid, prompt.attempt) not in self._leased
        self.check("I6", is_new, "attempt {} is leased again, perhaps in another term", prompt.attempt, uid=uid)
        self._leased.add((uid, prompt.attempt))
        generator, member = self.generators[holder], self.head.state.members.by_name[holder]
        version = generator.version
        fresh = version is not None and version >= max(self.v, prompt.born)
        fresh = fresh or member.again < generator.n_joins  # it joined again, and reports it soon
        self.check(
            "I7", fresh, "{} holds {} when {} is published, born {}", holder, version, self.v, prompt.born, uid=uid
        )
        survives = version is None or generator.weights == self.weights.get(version)
        self.check("I7", survives, "{} holds {}, of a lost timeline", holder, generator.weights, uid=uid)
        most = self.scenario.most_samples
        batch = self.scenario.batch_size * most  # at eta = 0 shares do not depend on slots
        room = max(self.scenario.capacity, most if self.scenario.eta else batch)
        self.check(
            "I9", member.load <= room, "{} was given {} samples at once, it has {}", holder, member.load, room, uid=uid
        )

    def _on_scored(self, line: dict[str, Any]) -> None:
        if line.get("evaluation"):
            return
        uid, sample = line["uid"], line["sample"]
        prompt = self._of(uid)
        self.check("I6", line["attempt"] == prompt.attempt, "a result of attempt {} counted", line["attempt"], uid=uid)
        self.check("I4", sample not in prompt.accepted, "sample {} counted twice", sample, uid=uid)
        self.check("I3", prompt.state == "live", "a result counted when it was {}", prompt.state, uid=uid)
        prompt.accepted[sample] = line["attempt"]
        prompt.tokens[sample] = line["n_tokens"]
        if line["status"] == "value" or self._declared(line["status"]) is not None:
            prompt.rewards[sample, line["attempt"]] = line["reward"]
        prompt.roles[sample, line["attempt"]] = line.get("roles", "")
        if line["correct"] is not None:
            prompt.correct[sample, line["attempt"]] = line["correct"]
        if line["status"] != "value":
            prompt.failures[sample, line["attempt"]] = line["status"]
        n_samples, n_without = self.scenario.samples_at(prompt.born, prompt.row[0]), len(self.without(prompt))
        if n_without and (not self.scenario.partial_groups or n_samples - n_without < 2):
            prompt.failed = line["status"]
        elif len(prompt.accepted) == n_samples and not self.scenario.compares:
            self.whole.add((prompt.born, uid))

    def _on_compared(self, line: dict[str, Any]) -> None:
        """The verdict of a group counts once, over all its samples, as a reward gave it."""
        uid, status, rewards = line["uid"], line["status"], tuple(line.get("rewards", ()))
        prompt = self._of(uid)
        self.check("I4", not prompt.is_compared, "its samples are compared twice", uid=uid)
        is_whole = len(prompt.accepted) == self.scenario.samples_at(prompt.born, prompt.row[0])
        self.check("I8", is_whole, "{} samples are compared", len(prompt.accepted), uid=uid)
        verdict = (uid, line["attempt"], status, rewards)
        given = any(verdict in reward.group_verdicts for reward in self.rewards)
        self.check("I10", given and line["attempt"] == prompt.attempt, "{} was never given", verdict, uid=uid)
        if status == m.VerdictStatus.VALUE:
            prompt.is_compared = True
            prompt.compared.add(frozenset(prompt.accepted.items()))
            self.whole.add((prompt.born, uid))
        else:
            prompt.failed = status

    def without(self, prompt: Followed) -> set[int]:
        """Its samples without a reward: the verdict is no number, and none is declared (I10)."""
        failed = {sample: prompt.failures.get((sample, attempt)) for sample, attempt in prompt.accepted.items()}
        return {sample for sample, status in failed.items() if status is not None and self._declared(status) is None}

    def _declared(self, status: str) -> float | None:
        return self.scenario.on_timeout if status == m.VerdictStatus.TIMEOUT else self.scenario.on_error

    def _on_unsampled(self, line: dict[str, Any]) -> None:
        """Another generator gets the prompt, or none does: in either case, a simulated one gave the reason itself."""
        is_late = line["error"].startswith(TIMED_OUT)  # at a guest
        honest = line["reason"] != m.Refund.SAMPLING_ERROR or line["error"] == NO_REASON or is_late
        self.check(
            "I5", honest, "nobody may be given a sample that contradicts itself: {}", line["error"], uid=line["uid"]
        )

    def _on_refund(self, line: dict[str, Any]) -> None:
        uid = line["uid"]
        prompt = self._of(uid)
        self.check("I3", prompt.state == "live", "refunded when it was {}", prompt.state, uid=uid)
        prompt.state = "refunded"
        is_whole = (prompt.born, uid) in self.whole
        self.whole.discard((prompt.born, uid))
        prompt.n_accounted += line["n_tokens_dropped"]
        self.n_live -= 1
        self.rows[prompt.row] = "again" if line["again"] else "refunded"
        self.excuses.on_refund(line["reason"])
        reasons = self._reasons(prompt, is_whole=is_whole)
        if line["reason"] == m.Refund.NO_SIGNAL:
            self.n_refilled += 1
            self.learned[uid] = prompt.learned
        self.check(
            "I3",
            line["reason"] in reasons,
            "refunded as {}, which only {} may",
            line["reason"],
            sorted(reasons),
            uid=uid,
        )
        self._on_unsampled(line)
        if line["reason"] == m.Refund.POISON:
            self.check("I4", prompt.n_leases > 2, "retired after {} leases", prompt.n_leases, uid=uid)
        told = line["n_tokens_dropped"]
        self.check(
            "I12", told == prompt.n_received, "{} tokens dropped of {} received", told, prompt.n_received, uid=uid
        )
        self._count()

    def _reasons(self, prompt: Followed, *, is_whole: bool) -> set[str]:
        """Reasons for which the prompt may be refunded now."""
        if prompt.failed:
            return {f"reward_{prompt.failed}"}
        scenario, refund = self.scenario, m.Refund
        known = {
            refund.SAMPLING_ERROR: True,
            refund.POISON: True,
            refund.NO_SIGNAL: is_whole and prompt.is_flat and self.n_refilled < scenario.max_refill,
            refund.TOO_OLD: scenario.policy is StalenessPolicy.DROP and self.u - prompt.born > scenario.eta,
            refund.END_OF_RUN: self.u >= scenario.total_steps
            or scenario.evaluate_patience > 0
            or scenario.on_collapse == "stop",
            refund.END_OF_DATA: scenario.n_rows is not None and len(self.rows) == scenario.n_rows,
        }
        return {str(reason) for reason, may_be in known.items() if may_be}

    def _on_partial(self, holder: str, partial: m.Partial) -> None:
        """A report of an earlier holder that the head sends to the next one."""
        uid, report = partial.uid, self.reports[report_number(partial)]
        prompt, known = self.prompts[uid], report.key
        self.check("I6", partial.attempt == prompt.attempt, "attempt {} is begun in part", partial.attempt, uid=uid)
        is_same = known[:2] == ("", uid) and known[3] == partial.sample and report.spans == partial.spans
        self.check("I5", is_same, "what {} had as {} is now {}", known, report.spans, partial.spans, uid=uid)
        self.check("I4", partial.sample not in prompt.accepted, "sample {} counted already", partial.sample, uid=uid)
        survives = all(weights == self.weights.get(version) for version, weights in report.made_by)
        self.check("I5", survives, "{} goes on from tokens of a lost timeline: {}", holder, report.made_by, uid=uid)
        self._handed_on[uid, partial.sample, partial.attempt] = report
        generator = self.generators[holder]
        knows = generator.version is None or partial.spans[-1][0] <= generator.version
        self.check("I5", knows, "{} holds {}, the tokens are of {}", holder, generator.version, partial.spans, uid=uid)

    # batches

    def _on_batch(self, line: dict[str, Any]) -> None:
        self.check("I6", line["clock"] == self.u, "batch at clock {}, {} updates are finished", line["clock"], self.u)
        full = line["n_groups"] == self.scenario.batch_size
        short = line["short"] and 0 < line["n_groups"] < self.scenario.batch_size
        self.check("I8", full or short, "a batch of {} groups", line["n_groups"])
        if line["short"]:
            self.check("I8", self.n_live == line["n_groups"], "a short batch while {} prompts live", self.n_live)
        self._on_left_out(line)
        self.is_refilled = (
            self.n_refilled == self.scenario.max_refill or self.head.state.is_draining or self._all_rows_are_out
        )
        self.n_refilled = 0
        self.taken[line["step"]] = set()
        self.update_of[line["step"]] = self.taken[line["step"]].copy()

    @property
    def _all_rows_are_out(self) -> bool:
        return self.scenario.n_rows is not None and len(self.rows) == self.scenario.n_rows

    def _on_left_out(self, line: dict[str, Any]) -> None:
        """Samples left out of trained groups must be named, and their tokens counted as dropped (I8, I12)."""
        numbers = line.get("missing", [])
        named = self.named[line["step"]] = set(zip(numbers[::2], numbers[1::2], strict=True))
        n_tokens = 0
        for uid, sample in named:
            prompt = self._of(uid)
            prompt.n_accounted += prompt.tokens.get(sample, 0)
            n_tokens += prompt.tokens.get(sample, 0)
        told = line.get("n_tokens_dropped", 0)
        self.check("I12", told == n_tokens, "{} tokens dropped of {} left out", told, n_tokens)

    def _on_shard_item(self, item: m.ShardItem) -> None:
        uid, sample = item.uid, item.sample
        prompt = self._of(uid)
        self.groups.setdefault(item.step, {}).setdefault(uid, set()).add(sample)
        self.handed.add((item.step, uid, sample))
        attempt = prompt.accepted.get(sample, -1)
        made = self._made(("", uid, attempt, sample))
        self.check("I5", item.spans == made.spans, "spans {} were stamped {}", item.spans, made.spans, uid=uid)
        report = self._handed_on.get((uid, sample, attempt))
        if made.n_done and report is not None:
            kept = begins_with(made.spans, report.spans) and made.made_by[: len(report.made_by)] == report.made_by
            self.check("I5", kept, "{} does not go on from {}", made.spans, report.spans, uid=uid)
        lost = self.lost_weights(made.key)
        self.check("I5", not lost, "tokens were made by {}, of a lost timeline", lost, uid=uid)
        versions = [version for version, _ in item.spans]
        grows = versions == sorted(versions) and prompt.born <= versions[0] and versions[-1] <= item.clock
        self.check("I5", grows, "versions {}, born {}, clock {}", versions, prompt.born, item.clock, uid=uid)
        known, failure = (uid, sample, attempt), prompt.failures.get((sample, attempt))
        if failure is None:
            single = prompt.rewards.get((sample, attempt))
            given = any(single in reward.values.get(known, ()) for reward in self.rewards)
            given = given and item.reward == prompt.rewards_of().get(sample)
        else:
            failed = any(failure in reward.failures.get(known, ()) for reward in self.rewards)
            given = failed and item.reward == self._declared(failure)
        self.check("I10", given, "reward {} was never given, nor declared", item.reward, uid=uid)
        self._check_trajectories(item, prompt, made)

    def _check_trajectories(self, item: m.ShardItem, prompt: Followed, made: SimulatedSample) -> None:
        """The turns are those of the episode; each sampled token is in one trajectory, which has its role's reward."""
        n_tokens, told = sum(n for _, n in made.spans), (item.segments, item.trajectories, item.roles)
        expected = episode(item.uid, item.sample, n_tokens)
        self.check("I5", told == expected, "turns {} were {}", told, expected, uid=item.uid)
        parts = split(item.segments, item.trajectories)
        covered = sorted(i for one in parts for i in within(one.sampled))
        self.check("I4", covered == list(range(n_tokens)), "{} are in no or two trajectories", covered, uid=item.uid)
        has_own = item.roles and item.sample in prompt.rewards_of()  # without any, I10 is broken above
        rewards = [reward for _, reward in prompt.rewards_by_role(item.sample)] if has_own else []
        self.check("I10", item.rewards == rewards, "trajectories have {}, not {}", item.rewards, rewards, uid=item.uid)

    def lost_weights(self, key: tuple[str, int, int, int]) -> list[str]:
        """The weights of a sample that are not in the surviving history."""
        return [weights for version, weights in self._made(key).made_by if weights != self.weights.get(version)]

    def n_tokens(self, uid: int, sample: int, attempt: int) -> int:
        """Number of tokens that a generator recorded for this sample."""
        return sum(n for _, n in self._made(("", uid, attempt, sample)).spans)

    def _made(self, key: tuple[str, int, int, int]) -> SimulatedSample:
        """The sample as its generator recorded it."""
        return next((g.finished[key] for g in self.generators.values() if key in g.finished), SimulatedSample(key, 0))

    def trained(self, item: m.ShardItem, runs: list[tuple[int, bool]]) -> None:
        """A learner rank trains these runs of tokens."""
        scenario, uid, clock = self.scenario, item.uid, item.clock
        if (item.step, uid, item.sample) not in self.handed:
            return  # from a learner that a newer term replaced
        self.check(
            "I4", (uid, item.sample) not in self.samples_trained, "sample {} is trained again", item.sample, uid=uid
        )
        self.samples_trained.add((uid, item.sample))
        lags = [clock - version for (version, _), (_, trained) in zip(item.spans, runs, strict=True) if trained]
        policy = scenario.policy
        if policy is StalenessPolicy.PAPER:
            self.check("I2", len(lags) == len(runs), "paper trains every token", uid=uid)
            return
        self.check("I2", max(lags, default=0) <= scenario.eta, "trained tokens lag {}", max(lags, default=0), uid=uid)
        if policy is not StalenessPolicy.MASK:
            age = clock - self._of(uid).born
            self.check("I2", age <= scenario.eta and len(lags) == len(runs), "trained at c - born = {}", age, uid=uid)

    def _on_trajectory(self, line: dict[str, Any]) -> None:
        uid, step = line["uid"], line["step"]
        prompt = self._of(uid)
        prompt.n_accounted += line["n_tokens"]
        masks, oldest = self.scenario.policy is StalenessPolicy.MASK, line["clock"] - self.scenario.eta
        spans = zip(line["versions"][::2], line["versions"][1::2], strict=True)
        n_masked = sum(n for version, n in spans if masks and version < oldest)
        self.n_masked += n_masked
        self.check(
            "I2",
            line["n_masked"] == n_masked,
            "{} tokens are masked, {} are too old",
            line["n_masked"],
            n_masked,
            uid=uid,
        )
        if prompt.state != "training":
            self.learned[uid] = prompt.learned
            self.check("I3", prompt.state == "live", "taken when it was {}", prompt.state, uid=uid)
            prompt.state, prompt.batch = "training", step
            self.n_live -= 1
            self.taken[step].add(uid)
            self.update_of[step].add(uid)
            oldest = min({(prompt.born, uid), *self.whole})
            self.check("I8", oldest[1] == uid, "it is taken before prompt {}, which is older", oldest[1], uid=uid)
            self.whole.discard((prompt.born, uid))
            may_be_flat = self.is_refilled or not prompt.is_flat
            self.check("I8", may_be_flat, "a group without signal is trained, and it could be replaced", uid=uid)

    # the clock

    def _on_update(self, line: dict[str, Any]) -> None:
        self.check("I6", line["version"] == self.u + 1, "update {} after {}", line["version"], self.u)
        self.make(line["version"], line["digest"])

    def make(self, version: int, weights: str) -> None:
        """A learner has trained the batch before this version."""
        self.u = version
        self.weights[version] = weights
        groups, named = self.groups.pop(version - 1, {}), self.named.pop(version - 1, set())
        for uid in self.update_of.pop(version - 1, ()):
            prompt = self._of(uid)
            prompt.state = "trained"
            samples = groups.get(uid, set())
            without = self.without(prompt)
            whole = samples == set(range(self.scenario.samples_at(prompt.born, prompt.row[0]))) - without
            may_be = not without or (self.scenario.partial_groups and len(samples) >= 2)
            self.check("I8", whole and may_be, "its group has samples {}", sorted(samples), uid=uid)
            told = {sample for other, sample in named if other == uid}
            self.check("I8", told == without, "samples {} are left out, {} are named", without, told, uid=uid)
            left_out = [sample for sample in samples if (uid, sample) not in self.samples_trained]
            self.check("I8", not left_out, "samples {} of its batch were not trained", left_out, uid=uid)
            known = self.rows[prompt.row]
            self.check("I4", known == "open", "row {} was {} when it was trained", prompt.row, known, uid=uid)
            self.rows[prompt.row] = "trained"
            even = prompt.n_accounted == prompt.n_received
            self.check("I12", even, "{} tokens of {} accounted for", prompt.n_accounted, prompt.n_received, uid=uid)
        self._count()

    def _on_publish(self, line: dict[str, Any]) -> None:
        self.check("I6", self.v <= line["version"] <= self.u, "{} published after {}", line["version"], self.v)
        wrong = self.pushed.on_publish(line)
        self.check("I6", not wrong, "{}", wrong)
        self.v = line["version"]
        for batch in [batch for batch in self.taken if batch < self.v]:
            del self.taken[batch]

    def _on_push(self, begin: m.PushBegin) -> None:
        self.pushed.on_begin(begin, self.now)
        held = self.learners.weights.get((begin.store, begin.version)) if self.learners is not None else None
        survives = held is not None and held == self.weights.get(begin.version)
        self.check("I5", survives, "{} pushes {} as version {}", begin.store, held, begin.version)

    def _count(self) -> None:
        """Check the counts of the head's ledger after an update."""
        ledger = self.head.state.ledger
        total = sum(ledger.counts.values()) + ledger.n_before
        self.check("I3", total == ledger.next_uid, "states hold {} prompts of {}", total, ledger.next_uid)

    def end(self) -> None:
        """After a normal end nothing is open."""
        for uid, prompt in self.prompts.items():
            closed = prompt.state in ("trained", "refunded")
            self.check("I3", closed, "it is {} at the end", prompt.state, uid=uid)
        closed_states = {"trained", "refunded"}
        if self.u >= self.scenario.total_steps and self.scenario.policy is StalenessPolicy.DROP:
            closed_states.add("again")  # the run ended before the row was issued again
        for row, state in self.rows.items():
            self.check("I4", state in closed_states, "row {} is {} at the end", row, state)
        gate, ledger = self.head.state.gate, self.head.state.ledger
        idle = gate.is_idle and not ledger.n_live
        self.check("I3", idle, "{} live, {} in training, {} in the ledger", gate.live, gate.in_training, ledger.n_live)
        for member in self.head.state.members.alive():
            self.check(
                "I9", not member.leased, "{} keeps the slots of {} at the end", member.name, sorted(member.leased)
            )
