"""Accounting: tokens by fate, ages of what was trained, and evaluations."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from areal_bus.core import evaluation_metrics as metrics
from tools import surviving_history
from tools.audit.actor_logs import grows
from tools.audit.journal_reader import JournalFile, Line
from tools.audit.ledger import AcceptedSample
from tools.audit.run_settings import RunSettings


@dataclass(slots=True)
class Ages:
    """Counts by lag, in versions: c - version for tokens, c - born and c - oldest token for trajectories."""

    setup: RunSettings
    by_born: Counter[int] = field(default_factory=Counter)
    by_oldest: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)  # tokens
    masked: Counter[int] = field(default_factory=Counter)
    n_trajectories: int = 0

    def take(self, line: Line, born: int, file: JournalFile) -> None:
        """One trajectory of a batch, leased at version `born`."""
        clock, versions, n_tokens, n_masked = line["clock"], line["versions"], line["n_tokens"], line["n_masked"]
        ids = {"uid": line["uid"], "sample": line["sample"]}
        self.n_trajectories += 1
        self.by_born[clock - born] += 1
        if not grows(versions):
            file.add("I5", f"versions never decrease along a trajectory: {versions}", **ids)
            return
        if versions:
            self.by_oldest[clock - versions[0]] += 1
            if not born <= versions[0] <= versions[-2] <= clock:
                text = f"born <= version <= c for every token: born {born}, versions {versions}, c {clock}"
                file.add("I5", text, **ids)
        self._count(versions, clock, n_masked)
        broken = self._broken(clock, born, versions, n_masked)
        if broken is not None:
            file.add("I2", broken, **ids)
        if sum(versions[1::2]) != n_tokens:
            file.add("I5", f"every sampled token has one version: {sum(versions[1::2])} of {n_tokens}", **ids)

    def _count(self, versions: list[int], clock: int, n_masked: int) -> None:
        if not n_masked and len(versions) == 2:
            self.trained[clock - versions[0]] += versions[1]
            return
        spans = surviving_history.span_pairs(versions)
        rest = surviving_history.trained_spans(spans, n_masked)
        for version, n in spans:
            self.masked[clock - version] += n
        for version, n in rest:
            self.trained[clock - version] += n
            self.masked[clock - version] -= n

    def _broken(self, clock: int, born: int, versions: list[int], n_masked: int) -> str | None:
        """The rule of the policy that this trajectory breaks, if it does."""
        eta, policy = self.setup.eta, self.setup.policy
        if eta is None or policy is None:
            return None
        if policy == "mask":
            old = sum(n for version, n in zip(versions[::2], versions[1::2], strict=True) if clock - version > eta)
            if old != n_masked:
                oldest = clock - versions[0] if versions else 0
                rule = f"mask: just the tokens with c - version > eta = {eta} are masked"
                return f"{rule}: {old}, not {n_masked} (the oldest is {oldest} behind)"
            return None
        if n_masked:
            return f"{policy}: no token is masked: {n_masked} are"
        if policy in ("hold", "drop") and clock - born > eta:
            return f"{policy}: c - born <= eta = {eta} for every trajectory: {clock} - {born} = {clock - born}"
        return None


@dataclass(slots=True)
class LengthHistogram:
    """Samples by number of tokens, and how many of them the length limit cut off."""

    n: Counter[int] = field(default_factory=Counter)
    cut: int = 0

    def add(self, n_tokens: int, finish: str) -> None:
        self.n[n_tokens] += 1
        self.cut += finish == "length"

    def figures(self) -> dict[str, float | int | None]:
        """Count, mean and quartiles of one kind, and the share that was cut off."""
        n = self.n.total()
        mean = sum(length * k for length, k in self.n.items()) / n if n else None
        shares = {name: quantile(self.n, share) for name, share in (("median", 0.5), ("p90", 0.9), ("max", 1.0))}
        return {"n": n, "mean": mean, **shares, "truncated_share": self.cut / n if n else None}


def quantile(counts: Counter[int], share: float) -> int | None:
    """The smallest value such that at least this share of all values is not larger; None without values."""
    needed, so_far = share * counts.total(), 0
    for value in sorted(counts):
        so_far += counts[value]
        if so_far >= needed:
            return value
    return None


@dataclass(slots=True)
class Evaluated:
    """Verdicts of one evaluation."""

    n: int = 0
    rewards: list[float] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)
    n_by_uid: Counter[int] = field(default_factory=Counter)
    rows: dict[int, list[bool]] = field(default_factory=dict)  # judged answers by uid
    versions: list[int] = field(default_factory=list)  # oldest and newest of each answer


class Evaluations:
    """Checks `scored` and `evaluation` lines of the head. A new term restarts an open evaluation."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.n = 0
        self._open: dict[str, Evaluated] = {}

    def go_back(self) -> None:
        self._open.clear()

    def score(self, line: Line) -> None:
        known = self._open.setdefault(line["evaluation"], Evaluated())
        known.n += 1
        known.n_by_uid[line["uid"]] += 1
        known.versions += [x for x in (line["min_version"], line["max_version"]) if x is not None]
        if line["status"] == "value":
            known.rewards.append(line["reward"])
            if line["correct"] is not None:
                known.judged.append(line["correct"])
                known.rows.setdefault(line["uid"], []).append(line["correct"])

    def close(self, line: Line) -> None:
        """A timeout or an error is counted, never a 0."""
        known = self._open.pop(line["name"], Evaluated())
        self.n += 1
        told = (line["n"], line["reward"], line["accuracy"])
        mine = (known.n, _mean(known.rewards), _mean(known.judged))
        n_without = known.n - len(known.rewards)
        if line["n_failed"] < n_without or not all(map(_same, told, mine)):
            rule = f"an evaluation's n, reward and accuracy are of its values alone ({n_without} have none)"
            self.file.add("I10", f"{rule}: {mine}, not {told}", version=line["version"])
        n_missing = line.get("n_asked", 0) - len(known.rewards)
        if "n_asked" in line and line["n_missing"] != n_missing:
            text = f"an evaluation names the answers that it lacks: {n_missing}, not {line['n_missing']}"
            self.file.add("I10", text, version=line["version"])
        if "k" in line:  # journals of older runs have no metrics
            self._check_metrics(line, known)

    def _check_metrics(self, line: Line, known: Evaluated) -> None:
        """Each problem has all its samples or counts as failed. Metrics and versions match the answers."""
        k, rows, version = line["k"], list(known.rows.values()), line["version"]
        short = [uid for uid, n in known.n_by_uid.items() if n != k]
        if len(short) > line["n_failed"]:
            rule = f"an evaluation ends when each problem has its {k} samples or has failed"
            self.file.add("I3", f"{rule}: {len(short)} have another number, {line['n_failed']} failed", version=version)
        told = (line["avg_at_k"], line["avg_at_k_se"], line["pass_at_k"])
        mine = (metrics.average(rows), metrics.standard_error(rows), metrics.pass_at(k, rows))
        if not all(map(_same, told, mine)):
            self.file.add("I10", f"avg@k, its error and pass@k are of the answers: {mine}, not {told}", version=version)
        span = (min(known.versions, default=None), max(known.versions, default=None))
        if (line["version_first"], line["version_last"]) != span or (span[0] is not None and span[0] < version):
            named = (line["version_first"], line["version_last"])
            rule = f"the answers of an evaluation begun at version {version} have the versions that it names"
            self.file.add("I5", f"{rule}: {span}, not {named}", version=version)


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other))


KINDS = ("scored", "trained", "dropped")


@dataclass(slots=True)
class Tokens:
    """Token counts of all terms together; `in_batches` counts batches of the surviving history only."""

    received: int = 0
    found: int = 0  # lost in one term, restored by the head checkpoint of a later one
    in_batches: int = 0
    waiting: int = 0  # received, of prompts that are open at the last line
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    lengths: dict[str, LengthHistogram] = field(default_factory=lambda: {kind: LengthHistogram() for kind in KINDS})
    dropped_lengths: dict[str, LengthHistogram] = field(default_factory=dict)  # by reason
    n_unscored: int = 0  # samples of refunded prompts that had no verdict yet

    def drop(self, samples: Iterable[AcceptedSample], reason: str) -> None:
        """Count a received sample that will never be trained."""
        by_reason = self.dropped_lengths.setdefault(reason, LengthHistogram())
        for sample in samples:
            self.dropped[reason] += sample.n_tokens
            self.lengths["dropped"].add(sample.n_tokens, sample.finish)
            by_reason.add(sample.n_tokens, sample.finish)

    @property
    def accounted(self) -> int:
        return self.in_batches + self.dropped.total() + self.waiting


@dataclass(slots=True)
class Undone:
    """Work that a later term rolled back: it is not in the surviving history."""

    updates: int = 0
    prompts: int = 0  # whose uids were issued again
    trajectories: int = 0  # of batches
    tokens: int = 0  # of those trajectories
