"""How old trained samples were and how long: I2 by policy, lags and lengths as exact counts; knows no head."""

from collections import Counter
from dataclasses import dataclass, field

from tools import age
from tools.audit.makers import grows
from tools.audit.reading import File, Line
from tools.audit.setup import Setup


@dataclass(slots=True)
class Ages:
    """Counts by lag, in versions: c - version for tokens, c - born and c - oldest token for trajectories."""

    setup: Setup
    by_born: Counter[int] = field(default_factory=Counter)
    by_oldest: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)  # tokens
    masked: Counter[int] = field(default_factory=Counter)
    n_trajectories: int = 0

    def take(self, line: Line, born: int, file: File) -> None:
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
        spans = age.pairs(versions)
        rest = age.trained(spans, n_masked)
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
class Lengths:
    """How many samples have how many tokens, and how many of them were cut at the limit."""

    n: Counter[int] = field(default_factory=Counter)
    cut: int = 0

    def add(self, n_tokens: int, finish: str) -> None:
        self.n[n_tokens] += 1
        self.cut += finish == "length"

    def figures(self) -> dict[str, float | int | None]:
        """Count, mean, quartiles of a kind, and the share that was cut."""
        n = self.n.total()
        mean = sum(length * k for length, k in self.n.items()) / n if n else None
        shares = {name: quantile(self.n, share) for name, share in (("median", 0.5), ("p90", 0.9), ("max", 1.0))}
        return {"n": n, "mean": mean, **shares, "truncated_share": self.cut / n if n else None}


def quantile(counts: Counter[int], share: float) -> int | None:
    """The smallest value that at least this share of all does not pass; None when there is none."""
    needed, so_far = share * counts.total(), 0
    for value in sorted(counts):
        so_far += counts[value]
        if so_far >= needed:
            return value
    return None
