"""The hour of kills: a generator or reward every 5 s, the learner every 2 minutes; memory must not grow.

`FAULT_MINUTES=5 python -m pytest -m soak tests/faults/test_hour.py` shortens it.
"""

import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from areal_bus.messages import Role
from areal_lab.chaos.survivors import Survivors
from benchmarks.faults import recovery
from benchmarks.faults.bench import OF_HEAD, end, job_at
from benchmarks.faults.recovery import of_role, percentile
from benchmarks.jobs.real_job import KilledJob, Killer
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

MINUTES = float(os.environ.get("FAULT_MINUTES", "60"))
KILL_EVERY_S, LEARNER_EVERY_S = 5.0, 120.0
FEWEST = {Role.GENERATOR: 3.5, Role.REWARD: 3.5, Role.LEARNER: 0.4}  # kills a minute, of 12.5 asked for
P99_S = 5.0
GROWTH_MIB = 16.0  # of a process that lives for the whole hour, between the second quarter and the last


class Memory:
    """Resident MiB of the processes that are never killed: the head and every supervisor."""

    def __init__(self, job: KilledJob) -> None:
        self._job = job
        self.seen: dict[str, list[float]] = {}

    def look(self) -> None:
        assert self._job.process is not None
        head = self._job.pid("head-0")[1]
        for pid, who in [(head, "head"), *((pid, f"process {pid}") for pid in supervisors(self._job.process.pid))]:
            self.seen.setdefault(who, []).append(rss_mib(pid))

    def growth(self) -> dict[str, float]:
        """Medians of the last quarter less those of the second one."""
        found = {}
        for who, mib in self.seen.items():
            n = len(mib)
            found[who] = statistics.median(mib[3 * n // 4 :]) - statistics.median(mib[n // 4 : n // 2])
        return found


def supervisors(mpirun: int) -> list[int]:
    """Children of mpirun."""
    tasks = Path(f"/proc/{mpirun}/task").glob("*/children")
    return sorted({int(pid) for task in tasks for pid in task.read_text().split()})


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.soak
def test_an_hour_of_kills_loses_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    job = job_at(tmp_path / "hour", quiet=True)
    killer, dice, memory = Killer(job, seed=2), random.Random(2), Memory(job)
    with job.started():
        job.wait_until(lambda: job.tail.n_updates > 5, "the ring turns")
        began = next_learner = time.monotonic()
        while (now := time.monotonic()) - began < 60 * MINUTES:
            if now >= next_learner + LEARNER_EVERY_S:
                next_learner = now
                killer.kill(Role.LEARNER, (0.0, 0.5))
            killer.kill(dice.choice((Role.GENERATOR, Role.REWARD)), (0.0, 0.5))
            memory.look()
            job.wait_until(lambda due=now + KILL_EVERY_S: time.monotonic() > due, "the next kill is due")
        end(job)
    lines = sorted(Run(job.run).events(*OF_HEAD, role="head"), key=lambda line: float(line["t"]))
    survivors = Survivors.of(lines)
    assert not survivors.lost
    assert not survivors.twice
    judged = judge(audit(Run(job.run)))
    assert not {name: j.why for name, j in judged.items() if j.verdict is InvariantVerdict.BROKEN}
    leased = list(recovery.lease_recoveries(lines, of_role(killer.kills, Role.GENERATOR)))
    kills = Counter(fault.role for fault in killer.kills)
    assert {role: n for role, n in FEWEST.items() if kills[role] < int(n * MINUTES)} == {}, kills
    slowest = percentile(leased, 0.99)
    assert slowest is not None, "no prompt that a victim had was leased again"
    assert slowest < P99_S
    assert max(memory.growth().values()) < GROWTH_MIB, memory.growth()
