"""Accounting: tokens by fate, and ages of what was trained."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools import surviving_history
from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import grows
from tools.audit.replay.ledger import AcceptedSample
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
class Tokens:
    """Token counts of all terms together; `in_batches` counts batches of the surviving history only."""

    received: int = 0
    found: int = 0  # lost in one term, restored by the head checkpoint of a later one
    in_batches: int = 0
    waiting: int = 0  # received, of prompts that are open at the last line
    dropped: Counter[str] = field(default_factory=Counter)  # by reason

    def drop(self, samples: Iterable[AcceptedSample], reason: str) -> None:
        """Count received samples that will never be trained."""
        for sample in samples:
            self.dropped[reason] += sample.n_tokens

    @property
    def accounted(self) -> int:
        return self.in_batches + self.dropped.total() + self.waiting


@dataclass(slots=True)
class Undone:
    """Work that a later term rolled back: it is not in the surviving history."""

    updates: int = 0
    on_purpose: int = 0  # of these updates, by a rollback (watch.on_collapse)
    prompts: int = 0  # whose uids were issued again
    trajectories: int = 0  # of batches
    tokens: int = 0  # of those trajectories
