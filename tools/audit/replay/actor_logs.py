"""Evidence from the actors' own journals, ordered within a file: the weights that a process held at an event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from types import MappingProxyType
from typing import Any, NamedTuple

from tools.audit.findings import Findings
from tools.audit.journal_reader import Handler, JournalFile, Line
from tools.audit.replay.terms import ATTEMPTS, TermLog

Version = tuple[int, int]  # (term, version): how versions of different terms compare
GroupVerdict = tuple[str, tuple[float, ...]]  # of reward.group: status, rewards


NO_ROLES: Mapping[str, float] = MappingProxyType({})
ROLE_REWARD = "reward:role/"  # begins the field of a role's reward, on the lines of a verdict


def role_rewards_of(line: Line) -> Mapping[str, float]:
    """Role -> reward, of a `score` or `scored` line."""
    return {name.removeprefix(ROLE_REWARD): line[name] for name in line if name.startswith(ROLE_REWARD)} or NO_ROLES


class ScoreRecord(NamedTuple):
    """One verdict of a reward actor; `reward` is None unless the status is "value" (I10)."""

    status: str
    reward: float | None
    where: str
    wall: float
    role_rewards: Mapping[str, float] = NO_ROLES


class Made(NamedTuple):
    """A completed sample."""

    versions: tuple[int, ...]  # flat spans
    finish: str
    maker: str

    @property
    def n_tokens(self) -> int:
        return self.versions[1] if len(self.versions) == 2 else sum(self.versions[1::2])

    @property
    def told(self) -> tuple[int, str, int | None, int | None]:
        """Tokens, finish, oldest and newest version, which the head's `scored` line must repeat."""
        versions = self.versions
        return (self.n_tokens, self.finish, versions[0], versions[-2]) if versions else (0, self.finish, None, None)


@dataclass(slots=True)
class LeaseWork:
    """A generator's work on one lease."""

    maker: str
    held: Version  # when the first sample began
    where: str = ""  # the line of that
    is_leased: bool = False  # by the head's lines
    n_continued: int = 0  # tokens that other generators made
    begun: set[int] = field(default_factory=set)  # its samples


class Start(NamedTuple):
    """One start of a process by its own journal."""

    pid: int | None
    host: str | None


class HeldWeights(NamedTuple):
    """Weights that a process reports to hold."""

    digest: str
    where: str


@dataclass(slots=True)
class Evidence:
    """Evidence by id: key(uid, sample, attempt) for samples, (uid, attempt) for leases. Ids differ between terms."""

    terms: TermLog = field(default_factory=TermLog)
    completions: dict[int, Made] = field(default_factory=dict)  # training
    later: dict[int, int] = field(default_factory=dict)  # the term of a completion, if its lease is older
    n_completions: int = 0  # evaluations included
    scores: dict[int, ScoreRecord] = field(default_factory=dict)  # training: the first verdict
    more_scores: dict[int, list[ScoreRecord]] = field(default_factory=dict)  # of a sample that was sent twice
    evaluated: dict[tuple[str, int, int, int], list[ScoreRecord]] = field(default_factory=dict)  # of evaluations
    groups: dict[tuple[int, int], set[GroupVerdict]] = field(default_factory=dict)  # by (uid, attempt)
    answers: dict[tuple[str, int, int, int], Made] = field(default_factory=dict)  # completions of evaluations
    starts: dict[str, list[Start]] = field(default_factory=dict)  # by process
    work: dict[tuple[int, int], LeaseWork] = field(default_factory=dict)  # training
    pushed: dict[tuple[str, int, int], str] = field(default_factory=dict)  # (name, push, version) -> line of its part
    digests: dict[Version, HeldWeights] = field(default_factory=dict)
    n_digests: int = 0
    generators: set[str] = field(default_factory=set)
    rewards: set[str] = field(default_factory=set)
    steps: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # (learner, version) -> its figures
    learners: set[str] = field(default_factory=set)  # whose own journal is there
    outlived: list[tuple[Version, str, str]] = field(default_factory=list)  # a surviving learner's first, digest, name
    cut: dict[str, float] = field(default_factory=dict)  # rewards that were killed -> wall time of the last line

    def scores_of(self, sample: int) -> list[ScoreRecord]:
        first = self.scores.get(sample)
        return [] if first is None else [first, *self.more_scores.get(sample, [])]

    def made_in(self, sample: int) -> int:
        """The generator's term when it completed the sample."""
        return self.later.get(sample, attempt_of(sample) // ATTEMPTS)

    def surviving(self) -> dict[int, str]:
        """The digest of each version of the surviving history."""
        versions = {version for _, version in self.digests}
        made = {version: (self.terms.maker(version, before=len(self.terms.all)) or 0, version) for version in versions}
        return {version: self.digests[known].digest for version, known in made.items() if known in self.digests}

    def compare_bases(self, findings: Findings) -> None:
        """A term must begin with weights of an earlier term: their digests are equal (I5)."""
        for i, beginning in enumerate(self.terms.all):
            version = beginning.version
            maker = self.terms.maker(version, before=i) if version else None
            if maker is None:
                continue
            made, here = self.digests.get((maker, version)), self.digests.get((beginning.term, version))
            if made is not None and here is not None and made.digest != here.digest:
                rule = f"a term begins with the weights of its version: digest {here.digest[:12]} here"
                findings.add("I5", here.where, f"{rule}, {made.digest[:12]} at {made.where}", version=version)
        for held, digest, learner in self.outlived:
            here = self.digests.get(held)
            if here is not None and here.digest != digest:
                rule = f"a surviving learner continues with the weights that it made: {learner} made {digest[:12]}"
                findings.add("I5", here.where, f"{rule}, here is {here.digest[:12]}", version=held[1])


def key(uid: int, sample: int, attempt: int) -> int:
    return uid << 44 | sample << 28 | attempt


def uid_of(known: int) -> int:
    return known >> 44


def sample_of(known: int) -> int:
    return known >> 28 & 0xFFFF


def attempt_of(known: int) -> int:
    return known & 0xFFFFFFF


OF_THE_LINE = frozenset({"t", "wall", "term", "role", "rank", "inc", "seq", "event", "chain", "version", "u"})


class Begun(NamedTuple):
    """A live sample of a generator."""

    oldest: int  # version that may make a token of it here
    held: int  # version at its request
    n_done: int = 0  # its first tokens, which another generator made


def grows(versions: Sequence[int]) -> bool:
    """Whether flat spans are pairs of a version and a count of at least 1, with versions that never decrease (I5)."""
    if len(versions) == 2:
        return versions[1] >= 1
    pairs = range(0, len(versions), 2)
    if len(versions) % 2 or any(versions[i + 1] < 1 for i in pairs):
        return False
    return all(versions[i] <= versions[i + 2] for i in pairs[:-1])


class GeneratorLog:
    """All incarnations of one generator: the weights it held, and the versions it stamped on tokens (I5, I7)."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence, self.name = file, evidence, intern(file.name)
        self.held: Version | None = None  # of the weights, by its own `pushed` lines
        self.begun: dict[tuple[str, int, int, int], Begun] = {}  # live samples
        self.pushed: set[int] = set()  # versions that may make a token
        self.received: set[int] = set()  # versions that this life has held
        evidence.generators.add(self.name)

    def handlers(self) -> dict[str, Handler]:
        return {
            "start": self.start,
            "pushed": self.on_pushed,
            "request": self.on_request,
            "completion": self.on_completion,
        }

    def start(self, line: Line) -> None:
        self.held = None
        self.begun.clear()
        self.pushed.clear()
        self.received.clear()

    def on_pushed(self, line: Line) -> None:
        held = term, version = line.get("term", 0), line["version"]
        before = self.held
        if before is not None and held < before:
            text = f"a generator's (term, version) never goes back: {held} after {before}"
            self.file.add("I6", text, version=version)
        if before is not None and term > before[0]:
            self._forget_void(self.evidence.terms.base(after=before[0], to=term), version)
        start = line.get("delta_from")
        if start is not None and start not in self.received:
            text = f"a delta starts from a version that its member held: version {version} from {start}"
            self.file.add("I5", text, version=version)
        self.held = held
        self.received.add(version)
        self.pushed.add(version)
        self.evidence.pushed[self.name, line["push"], version] = self.file.where()
        digest(self.file, self.evidence, line)

    def _forget_void(self, base: int | None, version: int) -> None:
        """A term began at `base`: versions that older terms made after it may stamp no more tokens."""
        newest = version if base is None else base
        self.pushed = {known for known in self.pushed if known <= newest}
        self.begun = {sample: began._replace(oldest=min(began.oldest, version)) for sample, began in self.begun.items()}

    def on_request(self, line: Line) -> None:
        uid, sample, attempt = line["uid"], line["sample"], line["attempt"]
        if self.held is None:
            self.file.add("I7", "a generator gets work when it holds weights: it holds none", uid=uid, sample=sample)
            return
        evaluation = line.get("evaluation", "")
        n_done = line.get("n_done", 0)
        self.begun[evaluation, uid, attempt, sample] = Begun(self.held[1], self.held[1], n_done)
        if not evaluation:
            work = self.evidence.work.setdefault((uid, attempt), LeaseWork(self.name, self.held, self.file.where()))
            work.n_continued += n_done
            if sample in work.begun:
                self.file.add("I4", "a sample of one attempt begins once: it did", uid=uid, sample=sample)
            work.begun.add(sample)
            if work.maker != self.name:
                text = f"one generator samples an attempt: {work.maker} does"
                self.file.add("I6", text, uid=uid, sample=sample, attempt=attempt)
        elif n_done:
            self.file.add("I5", f"no sample of an evaluation is continued: {n_done} tokens", uid=uid, sample=sample)

    def on_completion(self, line: Line) -> None:
        uid, sample, attempt, versions = line["uid"], line["sample"], line["attempt"], line["versions"]
        evaluation = line.get("evaluation", "")
        began = self.begun.pop((evaluation, uid, attempt, sample), None)
        evidence = self.evidence
        evidence.n_completions += 1
        self._check(versions, line["n_tokens"], began, uid, sample)
        if evaluation:
            made = Made(tuple(versions), intern(line["finish"]), self.name)
            evidence.answers[evaluation, uid, sample, attempt] = made
            return
        known = key(uid, sample, attempt)
        if known in evidence.completions:
            self.file.add(
                "I4",
                "a sample of one attempt is completed once: it was before",
                uid=uid,
                sample=sample,
                attempt=attempt,
            )
        evidence.completions[known] = Made(tuple(versions), intern(line["finish"]), self.name)
        if (term := line.get("term", 0)) > attempt // ATTEMPTS:
            evidence.later[known] = term

    def _check(self, versions: list[int], n_tokens: int, begun: Begun | None, uid: int, sample: int) -> None:
        """Stamps are versions held between request and end (I5); others' tokens are no newer than at the request."""
        text, held = None, None if self.held is None else self.held[1]
        others, own = split(versions, begun.n_done if begun is not None else 0)
        began = begun.oldest if begun is not None else None
        if begun is None or began is None:
            text = "a sample ends that was begun: there is no request before it"
        elif not grows(versions):
            text = f"versions never decrease along a trajectory: {versions}"
        elif sum(versions[1::2]) != n_tokens:
            text = f"every sampled token has one version: {sum(versions[1::2])} stamps, {n_tokens} tokens"
        elif begun.n_done and (not own or others[-2] > begun.held):
            known = f"{versions}, of them {begun.n_done} done, held {begun.held}"
            text = f"a sample is continued, by a token or more, where what was done is known: {known}"
        elif own and (held is None or not began <= own[0] <= own[-2] <= held):
            text = f"a token's version is held while it is sampled: {own}, held {began}..{held}"
        elif not self.pushed.issuperset(own[::2]):
            text = f"a version is sampled after its push: {versions}, pushed {sorted(self.pushed)[-5:]}"
        if text is not None:
            self.file.add("I5", text, uid=uid, sample=sample)


def split(versions: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """Flat spans of the first n tokens, and of those after them."""
    first: list[int] = []
    rest: list[int] = []
    for version, n_tokens in zip(versions[::2], versions[1::2], strict=False):
        n_first = min(n, n_tokens)
        n -= n_first
        first += [version, n_first] if n_first else []
        rest += [version, n_tokens - n_first] if n_tokens > n_first else []
    return first, rest


class RewardLog:
    """Verdicts (I10): a timeout or an error carries no number."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence, self.name = file, evidence, file.name
        evidence.rewards.add(self.name)

    def handlers(self) -> dict[str, Handler]:
        return {
            "start": self.on_sign,
            "spans": self.on_sign,
            "score": self.on_score,
            "group_score": self.on_group_score,
            "end": self.on_end,
        }

    def on_group_score(self, line: Line) -> None:
        """A verdict of `reward.group`: rewards exactly when its status is value (I10)."""
        verdict = (line["status"], tuple(line.get("rewards", ())))
        if (verdict[0] == "value") != bool(verdict[1]):
            text = f"a group has rewards exactly when its status is value: {verdict[0]} has {len(verdict[1])}"
            self.file.add("I10", text, uid=line["uid"])
        self.evidence.groups.setdefault((line["uid"], line["attempt"]), set()).add(verdict)

    def on_sign(self, line: Line) -> None:
        self.evidence.cut[self.name] = line["wall"]

    def on_end(self, line: Line) -> None:
        self.evidence.cut.pop(self.name, None)

    def on_score(self, line: Line) -> None:
        uid, sample, status = line["uid"], line["sample"], line["status"]
        reward = line.get("reward")
        if (status == "value") != isinstance(reward, (int, float)):
            text = f"a reward is a number exactly when its status is value: {status} has {reward!r}"
            self.file.add("I10", text, uid=uid, sample=sample)
        score = ScoreRecord(status, reward, self.file.where(), line["wall"], role_rewards_of(line))
        if evaluation := line.get("evaluation", ""):
            self.evidence.evaluated.setdefault((evaluation, uid, sample, line["attempt"]), []).append(score)
            return
        known = key(uid, sample, line["attempt"])
        if known in self.evidence.scores:
            self.evidence.more_scores.setdefault(known, []).append(score)
        else:
            self.evidence.scores[known] = score


class LearnerLog:
    """The versions that a learner makes and pushes (I5, I6)."""

    def __init__(self, file: JournalFile, evidence: Evidence) -> None:
        self.file, self.evidence = file, evidence
        self.version: int | None = None  # of its newest update; None before the first

    def handlers(self) -> dict[str, Handler]:
        return {"start": self.start, "pushed": self.on_pushed, "step": self.on_step}

    def start(self, line: Line) -> None:
        self.version = None
        self.evidence.learners.add(self.file.name)

    def on_pushed(self, line: Line) -> None:
        if self.version is not None and line["version"] > self.version:
            self.file.add("I6", f"a version is pushed after its update: {line['version']}, updates {self.version}")
        self.evidence.pushed[self.file.name, line["push"], line["version"]] = self.file.where()
        digest(self.file, self.evidence, line)

    def on_step(self, line: Line) -> None:
        if self.version is not None and line["version"] != self.version + 1:
            self.file.add("I6", f"each update makes the next version: {line['version']} after {self.version}")
        self.version = line["version"]
        self.evidence.steps[self.file.name, line["version"]] = figures_of(line)


def figures_of(line: Line) -> dict[str, Any]:
    """The figures of a step, and the digest of its weights."""
    return {name: value for name, value in line.items() if name not in OF_THE_LINE}


def digest(file: JournalFile, evidence: Evidence, line: Line) -> None:
    """All processes that hold a version of a term hold the same weights (I5)."""
    version = line["version"]
    evidence.n_digests += 1
    known = evidence.digests.setdefault((line.get("term", 0), version), HeldWeights(line["digest"], file.where()))
    if known.digest != line["digest"]:
        rule = f"a version is one set of weights: digest {line['digest'][:12]} here"
        file.add("I5", f"{rule}, {known.digest[:12]} at {known.where}", version=version)
