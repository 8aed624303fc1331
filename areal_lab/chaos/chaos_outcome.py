"""The answer of a chaos run: ETTR, losses, recovery times by kind of fault, the audit; as JSON and as text."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lab.chaos.chaos_run import ChaosRun
from areal_lab.chaos.ettr import TrainingShare, training_share
from areal_lab.chaos.fault_schedule import FaultKind
from tools import terminal
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """Losses are judged at the end of the run; after a failure of the job they are unknown (None)."""

    share: TrainingShare | None
    faults: Mapping[str, int]  # kind -> number
    n_kills: int
    recovery: Mapping[str, Sequence[float]]  # kind -> seconds of each
    n_unrecovered: int
    n_undone: int  # updates
    n_lost: int | None  # prompts
    n_twice: int  # samples
    broken: Mapping[str, str]  # invariant -> why
    failure: str

    @property
    def is_clean(self) -> bool:
        return not (self.failure or self.broken or self.n_twice or self.n_lost)

    def as_json(self) -> dict[str, Any]:
        share = self.share
        return {
            "ettr": None if share is None else round(share.ettr, 4),
            "kills": self.n_kills,
            "faults": dict(self.faults),
            "updates": None if share is None else share.n_updates,
            "updates_lost": self.n_undone,
            "lost": self.n_lost,
            "trained_twice": self.n_twice,
            "audit_broken": list(self.broken),
            "recovery": {kind: summary(seconds) for kind, seconds in self.recovery.items()},
            "unrecovered": self.n_unrecovered,
            "wall_s": None if share is None else round(share.wall_s, 1),
            "pace_s": None if share is None else round(share.pace_s, 3),
            "failure": self.failure,
        }


def outcome_of(run: ChaosRun) -> ChaosOutcome:
    """Reads the whole journal for the audit."""
    survivors, recoveries = run.watch.survivors, run.watch.recoveries
    times = sorted(survivors.updates.values())
    share = training_share(times, recoveries.disturbed, begins=run.begins, ends=run.ends) if run.begins else None
    judged = judge(audit(run.watch.status.where))
    return ChaosOutcome(
        share=share,
        faults=dict(sorted(Counter(fault.label for fault in run.applied).items())),
        n_kills=sum(fault.kind in (FaultKind.KILL, FaultKind.RANK) for fault in run.applied),
        recovery=dict(sorted(recoveries.seconds.items())),
        n_unrecovered=len(recoveries.open),
        n_undone=survivors.n_undone,
        n_lost=None if run.failure else len(survivors.lost),
        n_twice=len(survivors.twice),
        broken={name: j.why for name, j in judged.items() if j.verdict is InvariantVerdict.BROKEN},
        failure=run.failure,
    )


def summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"n": len(seconds), "median_s": round(statistics.median(seconds), 2), "max_s": round(max(seconds), 2)}


def text_of(outcome: ChaosOutcome) -> list[str]:
    """A few sentences and a table."""
    share, lines = outcome.share, []
    if share is not None:
        lines.append(
            f"ETTR {share.ettr:.1%}: {share.n_updates} updates in {share.wall_s:.0f} s, of which {share.lost_s:.0f} s "
            f"are lost; undisturbed an update takes {share.pace_s:.2f} s"
        )
    lost = "unknown" if outcome.n_lost is None else outcome.n_lost
    lines.append(f"updates undone: {outcome.n_undone}; prompts lost: {lost}; samples trained twice: {outcome.n_twice}")
    broken = "; ".join(f"{name} is broken: {why}" for name, why in outcome.broken.items())
    lines.append(f"audit: {broken or 'no invariant is broken'}")
    rows = [["fault", "n", "recovery: median", "max"]]
    for kind, n in outcome.faults.items():
        found = (
            [f"{summary(outcome.recovery[kind])[key]:.1f} s" for key in ("median_s", "max_s")]
            if (kind in outcome.recovery)
            else ["-", "-"]
        )
        rows.append([kind, str(n), *found])
    lines += terminal.table(rows, right=frozenset({1, 2, 3}))
    if outcome.n_unrecovered:
        lines.append(f"not recovered from {outcome.n_unrecovered} faults before the end")
    if outcome.failure:
        lines.append(terminal.printable(outcome.failure))
    return lines
