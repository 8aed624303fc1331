"""Runs many seeds in parallel processes; reports schedules, events and violated invariants."""

import itertools
import json
import os
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from areal_bus.process.isolation import CHILD, child_path
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import draw
from areal_lab.staleness.simulator.story import outcomes

CHUNK = 2000  # schedules between two lines of a process
SHOWN = 20  # violations printed


@dataclass(slots=True)
class SoakTally:
    """Totals of some schedules."""

    schedules: int = 0
    events: int = 0
    cpu_s: float = 0.0
    terms: int = 0  # begun, beyond the first of each schedule
    undone: int = 0  # prompts whose training was rolled back
    by_policy: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add one line of a process."""
        found = json.loads(line)
        self.schedules += found["schedules"]
        self.events += found["events"]
        self.cpu_s += found["cpu_s"]
        self.terms += found["terms"]
        self.undone += found["undone"]
        self.by_policy += Counter(found["by_policy"])
        self.faults += Counter(found["faults"])
        self.checks += Counter(found["checks"])
        self.violations += found["violations"]

    def line(self) -> str:
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)})

    def count(self, ring: Ring, outcome: ScheduleOutcome) -> None:
        """Count one schedule."""
        scenario = ring.scenario
        self.schedules += 1
        self.events += outcome.n_events
        self.terms += max(0, ring.witness.n_terms - 1)
        self.undone += ring.witness.n_undone
        self.by_policy[str(scenario.policy)] += 1
        self.faults += ring.n_faults
        self.checks += ring.witness.n_checks
        about = f"seed {scenario.seed}, policy {scenario.policy}"
        self.violations += [f"{about}: {violation}" for violation in outcome.violations]


def run(*, n: int, first: int, n_jobs: int, as_json: bool) -> int:
    """Run all policies in turn, seed by seed. Returns 1 if an invariant did not hold."""
    if n < 1 or first < 0 or n_jobs < 0:
        raise ConfigError(f"schedules >= 1, a first seed >= 0 and jobs >= 0; got {n}, {first} and {n_jobs}")
    jobs = min(n_jobs or os.cpu_count() or 1, n)
    began = time.monotonic()
    tally = one_process(n, first) if as_json or jobs == 1 else many_processes(n, first, jobs)
    if not as_json:
        for line in report(tally, time.monotonic() - began):
            print(line)
    return 1 if tally.violations else 0


def one_process(n: int, first: int) -> SoakTally:
    """Run in this process; a line of figures after every chunk."""
    whole = SoakTally()
    for start in range(first, first + n, CHUNK):
        tally = SoakTally()
        began = time.process_time()
        seeds = range(start, min(start + CHUNK, first + n))
        for ring, outcome in outcomes(draw(seed, policy_of(seed)) for seed in seeds):
            tally.count(ring, outcome)
        tally.cpu_s = time.process_time() - began
        print(tally.line(), flush=True)
        whole.add(tally.line())
    return whole


def policy_of(seed: int) -> StalenessPolicy:
    return list(StalenessPolicy)[seed % len(StalenessPolicy)]


def many_processes(n: int, first: int, jobs: int) -> SoakTally:
    """Run each share of the seeds in a process of its own; read their lines as they come."""
    bounds = [first + n * i // jobs for i in range(jobs + 1)]
    line = [*CHILD, "areal_lab.staleness", "soak", "--json"]
    environment = os.environ | {"PYTHONPATH": child_path()}
    shares = [[*line, "--first", str(a), "--schedules", str(b - a)] for a, b in itertools.pairwise(bounds)]
    workers = [
        subprocess.Popen(share, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8")
        for share in shares
    ]
    tally = SoakTally()
    try:
        for text in as_they_come(workers):
            known = len(tally.violations)
            tally.add(text)
            for violation in tally.violations[known : known + SHOWN]:
                print(violation, flush=True)
            print(f"{tally.schedules} schedules, {len(tally.violations)} violations", flush=True)
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
    if max(codes) > 1:
        raise ConfigError(f"every process of the soak must come to its end; they ended with {codes}")
    return tally


def as_they_come(workers: list["subprocess.Popen[str]"]) -> Iterator[str]:
    """Yield the lines of all processes, read at once: a process with a full pipe would stop."""
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen(worker: "subprocess.Popen[str]") -> None:
        for text in worker.stdout or ():
            said.put(text)
        said.put(None)

    for worker in workers:
        threading.Thread(target=listen, args=(worker,), daemon=True).start()
    for _ in workers:
        while (text := said.get()) is not None:
            yield text


def report(tally: SoakTally, seconds: float) -> list[str]:
    """Print the last lines."""
    shares = ", ".join(f"{policy} {n}" for policy, n in sorted(tally.by_policy.items()))
    return [
        *tally.violations[:SHOWN],
        f"schedules {tally.schedules} ({shares})",
        f"events {tally.events}, checks {tally.checks.total()}",
        f"faults {tally.faults.total()} ({', '.join(f'{kind} {n}' for kind, n in sorted(tally.faults.items()))})",
        f"terms {tally.terms} after the first, prompts whose training was undone {tally.undone}",
        f"seconds {seconds:.0f}, {tally.schedules / max(tally.cpu_s, 1e-9):.0f} schedules a second and core",
        f"violations {len(tally.violations)}"
        + (
            as_here("; python -m areal_lab.staleness replay SEED --policy P tells the story")
            if tally.violations
            else ""
        ),
    ]
