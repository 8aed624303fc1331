"""Measures jobs of configs/sim512.toml with many ranks on this machine: `python -m benchmarks.jobs.many_ranks 64 128`.

Each job keeps the proportions of the config: a quarter of the ranks learn, a reward for 32 ranks, generators of 8.
With `--members` one rank learns, and every other rank is a generator, so that a push goes to all of them.
Three actors are killed: a generator, a reward and a learner. Prints a row for each job as soon as it has ended, and
ends a job when less than 4 GiB of memory are free. Linux only.
"""

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from areal_bus.process.commands import find_mpirun, mpirun_variables
from benchmarks.jobs.paused_jobs import descendants
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run, lines

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "sim512.toml"
VICTIMS = {4: "generator-0", 6: "reward-0", 8: "learner-0"}  # by the update after which each is killed
HEADINGS = (
    "ranks",
    "actors",
    "start s",
    "private MiB a rank",
    "all GiB",
    "push s",
    "pushed to",
    "head CPU ms a trajectory",
    "trajectories/s",
    "found dead",
    "journals MiB",
    "audit",
)
LEAST_FREE_MIB = 4096
LOOK_S = 1.0
LIMIT_S = 2400.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MIB = 2**20


@dataclass(slots=True)
class Job:
    """One job and what is measured while it runs."""

    run: Run
    process: "subprocess.Popen[bytes]"
    began: float = field(default_factory=time.time)
    killed: list[str] = field(default_factory=list)
    private_mib: float = 0.0  # of all processes below mpirun
    all_mib: float = 0.0  # with shared pages and page tables
    measuring: threading.Thread | None = None
    head: list[tuple[float, int]] = field(default_factory=list)  # (CPU seconds of the head, trajectories that it has)

    def look(self) -> None:
        """Kill who is due, and measure once half of the kills are done."""
        events = Counter(line["event"] for line in self.run.events("update", "scored", role="head"))
        for n, victim in VICTIMS.items():
            if events["update"] >= n and victim not in self.killed:
                with contextlib.suppress(ProcessLookupError):  # it starts again just now
                    os.kill(self.pid_of(victim), signal.SIGKILL)
                    self.killed.append(victim)
        if events["update"] >= 2 and Path(f"/proc/{self.pid_of('head-0')}").exists():
            self.head.append((cpu_s(self.pid_of("head-0")), events["scored"]))
        if events["update"] >= 3 and self.measuring is None:
            self.measuring = threading.Thread(target=self._measure_memory)  # takes long on a loaded machine
            self.measuring.start()

    def _measure_memory(self) -> None:
        self.private_mib, self.all_mib = memory_mib(descendants(self.process.pid))

    def pid_of(self, actor: str) -> int:
        """The process of the newest incarnation."""
        own = [path for path in self.run.journals(actor.partition("-")[0]) if path.name.startswith(f"{actor}.")]
        return int([line["pid"] for path in own for line in itertools.islice(lines(path), 1)][-1])


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * TICK_S


def free_mib() -> float:
    return int(Path("/proc/meminfo").read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0]) / 1024


def memory_mib(pids: list[int]) -> tuple[float, float]:
    """(private, proportional with page tables) MiB of these processes together."""
    private = everything = 0.0
    for pid in pids:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
            tables = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmPTE:")[1].split()[0]
        except (OSError, IndexError):  # it has just ended
            continue
        kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
        private += (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024
        everything += (kib["Pss"] + int(tables)) / 1024
    return private, everything


def proportions(n_ranks: int) -> dict[str, float]:
    """The settings of a job with the proportions of the config."""
    learners = n_ranks // 4
    rewards = max(1, n_ranks // 32)
    return {"topology.learners": learners, "topology.rewards": rewards, "data.batch_size": learners}


def all_members(n_ranks: int) -> dict[str, float]:
    """The settings of a job whose ranks are generators but one; at most 40 of them have work at a time."""
    return {
        "topology.learners": 1,
        "topology.rewards": 2,
        "topology.tensor_parallel": 1,
        "data.batch_size": 8,
        "rollout.max_concurrent_rollouts": 4,
        "learner.simulated.update_s": 6.0,
    }


def measure(n_ranks: int, shape: dict[str, float], folder: Path, steps: int, changes: list[str]) -> list[str]:
    """Run a job with its kills; returns its row. Raises SystemExit when it does not end well."""
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    name = f"ranks-{n_ranks}"
    settings = {
        "run.name": name,
        "run.folder": folder,
        "run.total_train_steps": steps,
        "topology.ranks": n_ranks,
        **shape,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += [word for change in changes for word in ("--set", change)]
    command = [find_mpirun(), "-np", str(n_ranks), sys.executable, "-m", "areal_bus.launch", str(CONFIG), *words]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | mpirun_variables(), stdout=output, stderr=output, cwd=ROOT, start_new_session=True
        )
    job = Job(Run(folder / name), process)
    try:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            if free_mib() < LEAST_FREE_MIB:
                raise SystemExit(f"fewer than {LEAST_FREE_MIB} MiB are free: {name} is ended")
            if job.run.journals("head"):
                job.look()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode or len(job.killed) != len(VICTIMS):
        raise SystemExit(f"{name} ended with {process.returncode}, killed {job.killed}; see {log}")
    return row(n_ranks, job)


def row(n_ranks: int, job: Job) -> list[str]:
    """The figures of a job that has ended."""
    events = list(job.run.events(role="head"))
    joined = {line["name"].rpartition(".")[0] for line in events if line["event"] == "joined"}
    healthy: dict[str, float] = {}
    for line in events:
        if line["event"] == "member" and line["state"] == "healthy":
            healthy.setdefault(line["name"].rpartition(".")[0], line["wall"])
    dead = [line for line in events if line["event"] == "member" and line["state"] == "dead"]
    pushes = [line["receive_s"] for line in job.run.events("pushed", role="learner")]
    (cpu_0, n_0), (cpu_1, n_1) = job.head[0], job.head[-1]
    scored = [line["wall"] for line in events if line["event"] == "scored"]
    verdicts = {verdict.verdict for verdict in judge(audit(job.run)).values()}
    return [
        str(n_ranks),
        str(len(joined) + 1),
        f"{max(healthy.values()) - job.began:.0f}",
        f"{job.private_mib / n_ranks:.1f}",
        f"{job.all_mib / 1024:.1f}",
        f"{statistics.median(pushes[1:]):.2f}",
        str(sum(name.startswith("generator") for name in joined)),
        f"{1000 * (cpu_1 - cpu_0) / max(1, n_1 - n_0):.2f}",
        f"{len(scored) / (scored[-1] - scored[0]):.0f}",
        str(len(dead)),
        f"{sum(path.stat().st_size for path in (job.run.folder / 'journal').iterdir()) / MIB:.1f}",
        "broken" if InvariantVerdict.BROKEN in verdicts else "clean",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs.many_ranks", description=__doc__.split("\n")[0])
    parser.add_argument("ranks", nargs="+", type=int, help="numbers of ranks, multiples of 32")
    parser.add_argument("--members", action="store_true", help="all ranks but one are generators of one rank each")
    parser.add_argument("--steps", type=int, default=12, help="updates of each job")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--folder", type=Path, help="of the runs; default: a temporary folder")
    options = parser.parse_args()
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for n_ranks in options.ranks:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            shape = all_members(n_ranks) if options.members else proportions(n_ranks)
            print("| " + " | ".join(measure(n_ranks, shape, folder, options.steps, options.set)) + " |", flush=True)


if __name__ == "__main__":
    main()
