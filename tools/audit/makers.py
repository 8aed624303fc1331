"""Generators, rewards and learners by their own files: what each may say, and the evidence that it gives.

Within one file the order is certain, so what a process held when it did something needs no clock to be known.
"""

from collections.abc import Sequence
from sys import intern
from typing import NamedTuple

from tools.audit.evidence import Evidence, Made, Push, Score, Version, Work, key
from tools.audit.reading import File, Handler, Line
from tools.audit.terms import ATTEMPTS

FIGURES = ("n_tokens", "n_tokens_trained", "n_tokens_masked", "n_tokens_skipped", "lag_max", "digest")  # kept


class Begun(NamedTuple):
    """A live sample of a generator."""

    oldest: int  # version that may make a token of it here
    held: int  # version at its request
    n_done: int = 0  # its first tokens, which another generator made


def grows(versions: Sequence[int]) -> bool:
    """Flat spans: whole pairs of a version and a count of at least 1, versions never decreasing (I5)."""
    if len(versions) == 2:
        return versions[1] >= 1
    pairs = range(0, len(versions), 2)
    if len(versions) % 2 or any(versions[i + 1] < 1 for i in pairs):
        return False
    return all(versions[i] <= versions[i + 2] for i in pairs[:-1])


class Generator:
    """One life after the other of one generator: what it held, and what it stamped (I5, I7)."""

    def __init__(self, file: File, evidence: Evidence) -> None:
        self.file, self.evidence, self.name = file, evidence, intern(file.name)
        self.held: Version | None = None  # of the weights, by its own `pushed` lines
        self.begun: dict[tuple[str, int, int, int], Begun] = {}  # live samples
        self.pushed: set[int] = set()  # versions that may make a token
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

    def on_pushed(self, line: Line) -> None:
        held = term, version = line.get("term", 0), line["version"]
        before = self.held
        if before is not None and held < before:
            text = f"a generator's (term, version) never goes back: {held} after {before}"
            self.file.add("I6", text, version=version)
        if before is not None and term > before[0]:
            self._forget_void(self.evidence.terms.base(after=before[0], to=term), version)
        self.held = held
        self.pushed.add(version)
        self.evidence.pushed.add((self.name, line["push"], version))
        digest(self.file, self.evidence, line)

    def _forget_void(self, base: int | None, version: int) -> None:
        """A term began at `base`: what older terms made after that version makes no token any more."""
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
            work = self.evidence.work.setdefault((uid, attempt), Work(self.name, self.held))
            work.n_continued += n_done
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
        """Stamps are versions that this process held between the sample's request and its end (I5).

        Those of tokens that another generator made are no newer than what this one held at the request.
        """
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
            text = (
                f"a sample is continued, by a token or more, where what was done is known: {versions}, of them "
                f"{begun.n_done} done, held {begun.held}"
            )
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


class Reward:
    """Verdicts (I10): a timeout or an error carries no number."""

    def __init__(self, file: File, evidence: Evidence) -> None:
        self.file, self.evidence, self.name = file, evidence, file.name
        evidence.rewards.add(self.name)

    def handlers(self) -> dict[str, Handler]:
        return {"start": self.on_sign, "spans": self.on_sign, "score": self.on_score, "end": self.on_end}

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
        score = Score(status, reward, self.file.where(), line["wall"])
        if evaluation := line.get("evaluation", ""):
            self.evidence.evaluated.setdefault((evaluation, uid, sample, line["attempt"]), []).append(score)
            return
        known = key(uid, sample, line["attempt"])
        if known in self.evidence.scores:
            self.evidence.more_scores.setdefault(known, []).append(score)
        else:
            self.evidence.scores[known] = score


class Learner:
    """The versions that a learner makes and pushes (I5, I6)."""

    def __init__(self, file: File, evidence: Evidence) -> None:
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
        digest(self.file, self.evidence, line)

    def on_step(self, line: Line) -> None:
        if self.version is not None and line["version"] != self.version + 1:
            self.file.add("I6", f"each update makes the next version: {line['version']} after {self.version}")
        self.version = line["version"]
        figures = {name: line[name] for name in FIGURES if name in line}
        self.evidence.steps[self.file.name, line["version"]] = figures


def digest(file: File, evidence: Evidence, line: Line) -> None:
    """All who hold a version of a term hold the same weights (I5)."""
    version = line["version"]
    evidence.n_digests += 1
    known = evidence.digests.setdefault((line.get("term", 0), version), Push(line["digest"], file.where()))
    if known.digest != line["digest"]:
        text = (
            f"a version is one set of weights: digest {line['digest'][:12]} here, {known.digest[:12]} at {known.where}"
        )
        file.add("I5", text, version=version)
