"""What generators, rewards and learners have said of their own work, by ids; knows no rule of theirs."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.audit.findings import Findings
from tools.audit.terms import ATTEMPTS, Terms

Version = tuple[int, int]  # (term, version): how versions of different terms compare


class Score(NamedTuple):
    """One verdict of a reward actor; `reward` is None unless the status is "value" (I10)."""

    status: str
    reward: float | None
    where: str
    wall: float


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
        """Tokens, finish, oldest and newest version: what the head's `scored` line repeats."""
        versions = self.versions
        return (self.n_tokens, self.finish, versions[0], versions[-2]) if versions else (0, self.finish, None, None)


@dataclass(slots=True)
class Work:
    """What a generator does of one lease."""

    maker: str
    held: Version  # when the first sample began
    n_continued: int = 0  # tokens that other generators made


class Push(NamedTuple):
    """Weights that a process says it holds."""

    digest: str
    where: str


@dataclass(slots=True)
class Evidence:
    """By ids: key(uid, sample, attempt) for samples, (uid, attempt) for leases; no two terms share one."""

    terms: Terms = field(default_factory=Terms)
    completions: dict[int, Made] = field(default_factory=dict)  # training
    later: dict[int, int] = field(default_factory=dict)  # the term of a completion, where its lease is of an older one
    n_completions: int = 0  # evaluations included
    scores: dict[int, Score] = field(default_factory=dict)  # training: the first verdict
    more_scores: dict[int, list[Score]] = field(default_factory=dict)  # of a sample that was sent twice
    evaluated: dict[tuple[str, int, int, int], list[Score]] = field(default_factory=dict)  # of evaluations
    work: dict[tuple[int, int], Work] = field(default_factory=dict)  # training
    pushed: set[tuple[str, int, int]] = field(default_factory=set)  # (name, push, version) that a generator completed
    digests: dict[Version, Push] = field(default_factory=dict)
    n_digests: int = 0
    generators: set[str] = field(default_factory=set)
    rewards: set[str] = field(default_factory=set)
    steps: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # (learner, version) -> its figures
    learners: set[str] = field(default_factory=set)  # whose own journal is there
    outlived: list[tuple[Version, str, str]] = field(default_factory=list)  # begun with by a learner that lives, digest
    cut: dict[str, float] = field(default_factory=dict)  # rewards that were killed -> wall time of the last line

    def scores_of(self, sample: int) -> list[Score]:
        first = self.scores.get(sample)
        return [] if first is None else [first, *self.more_scores.get(sample, [])]

    def made_in(self, sample: int) -> int:
        """The term that its generator was in when it completed the sample."""
        return self.later.get(sample, attempt_of(sample) // ATTEMPTS)

    def surviving(self) -> dict[int, str]:
        """The digest of each version as it is after all terms."""
        versions = {version for _, version in self.digests}
        made = {version: (self.terms.maker(version, before=len(self.terms.all)) or 0, version) for version in versions}
        return {version: self.digests[known].digest for version, known in made.items() if known in self.digests}

    def compare_bases(self, findings: Findings) -> None:
        """What a term begins with is, to the bit, what an older one made (I5)."""
        for i, beginning in enumerate(self.terms.all):
            version = beginning.version
            maker = self.terms.maker(version, before=i) if version else None
            if maker is None:
                continue
            made, here = self.digests.get((maker, version)), self.digests.get((beginning.term, version))
            if made is not None and here is not None and made.digest != here.digest:
                text = (
                    f"a term begins with the weights of its version: digest {here.digest[:12]} here, "
                    f"{made.digest[:12]} at {made.where}"
                )
                findings.add("I5", here.where, text, version=version)
        for held, digest, learner in self.outlived:
            here = self.digests.get(held)
            if here is not None and here.digest != digest:
                rule = f"a learner lives on with the weights that it made: {learner} made {digest[:12]}"
                findings.add("I5", here.where, f"{rule}, here is {here.digest[:12]}", version=held[1])


def key(uid: int, sample: int, attempt: int) -> int:
    """The ids of one sample of one attempt as a number."""
    return uid << 44 | sample << 28 | attempt


def uid_of(known: int) -> int:
    return known >> 44


def sample_of(known: int) -> int:
    return known >> 28 & 0xFFFF


def attempt_of(known: int) -> int:
    return known & 0xFFFFFFF
