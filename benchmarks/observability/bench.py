"""Bench `observability`: CPU of the journal, of a tracker's process and of a watched page, over the CPU of a step.

The job is the demo without its evaluations, and for comparison `configs/tiny.toml`, whose steps are a few tenths of a
second. Two moments are compared, some updates apart: CPU seconds of the actors, of the tracker and of `tools.watch
--web`, whose page is asked every 2 s. The journal's part is inside the actors: its lines of that time, and the samples,
are written again, each by a write of its own, and timed.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from areal_bus.storage.journal import Journal, compact
from areal_bus.storage.journal_segments import LineFile
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import demo
from benchmarks.jobs.real_job import KilledJob
from tools import run
from tools.run import Line, Run

TINY = "configs/tiny.toml"
WARM = 3  # updates before the first moment
LAP = {demo.CONFIG: 16, TINY: 100}  # and between the two
QUICK_LAP = {demo.CONFIG: 4, TINY: 25}
POLL_S = 2.0  # as the page does
ENVELOPE = {"t", "wall", "term", "role", "rank", "inc", "seq", "event", "chain"}
REPEATS = 5
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Moment:
    """CPU seconds until now, by part."""

    wall: float
    version: int
    cpu_s: dict[str, float]


class Observability:
    about = "CPU of the journal, a tracker and a watched page, over the CPU of a step of the demo"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without mpirun or the demo's model, or when a job ends early."""
        tiny = observed(TINY, quiet=quiet)
        keys = ("overhead_share", "step_cpu_ms", "journal_cpu_ms", "tracker_cpu_ms", "watch_cpu_ms", "lines_a_step")
        return observed(demo.CONFIG, quiet=quiet) | {f"tiny_{key}": tiny[key] for key in keys}


def observed(config: str, *, quiet: bool) -> Figures:
    """The figures of one job."""
    lap = pace.of(LAP, QUICK_LAP)[config]
    tracker = "tensorboard" if find_spec("tensorboard") is not None else "csv"
    changes = (
        f"run.total_train_steps={WARM + lap + 200}",
        "evaluate.before=false",
        "evaluate.after=false",
        f'journal.tracker=["{tracker}"]',
    )
    with tempfile.TemporaryDirectory(prefix="areal-bus-bench-") as folder:
        where = Path(folder) / "observed"
        job = KilledJob(where, config=config, changes=changes, ranks=demo.RANKS, quiet=quiet)
        with job.started():
            job.wait_until(lambda: job.tail.version >= 1, "the first update")
            with watched(where) as page:
                first = moment(where, page, at_update(job, WARM))
                last = moment(where, page, at_update(job, first.version + lap))
        lines = [line for line in Run(where).events() if first.wall <= line["wall"] < last.wall]
        samples = [x for x in Run(where).samples() if first.version <= x["version"] < last.version]
        journal_s = written_again(lines, samples)
    return figures(first, last, journal_s, len(lines)) | {"tracker": tracker}


def at_update(job: KilledJob, version: int) -> int:
    """Wait for this version; each update may take as long as the harness allows. The version that was reached."""
    while job.tail.version < version:
        reached = job.tail.version
        pace.say(reached + 1, version, "update")
        job.wait_until(lambda: job.tail.version > reached, f"update {version}")  # noqa: B023
    return job.tail.version


def figures(first: Moment, last: Moment, journal_s: float, n_lines: int) -> Figures:
    """CPU milliseconds a step of each part. The share is over the actors' CPU without the journal."""
    n = last.version - first.version
    spent = {part: (last.cpu_s[part] - first.cpu_s[part]) / n for part in first.cpu_s}
    journal = journal_s / n
    added = journal + spent["tracker"] + spent["watch"]
    bare = spent["actors"] - journal
    return {
        "bench": "observability",
        "overhead_share": round(added / bare, 5),
        "step_cpu_ms": round(1e3 * bare, 1),
        "journal_cpu_ms": round(1e3 * journal, 3),
        "tracker_cpu_ms": round(1e3 * spent["tracker"], 3),
        "watch_cpu_ms": round(1e3 * spent["watch"], 3),
        "lines_a_step": round(n_lines / n, 1),
        "steps": n,
        "seconds_a_step": round((last.wall - first.wall) / n, 3),
    }


@contextmanager
def watched(where: Path) -> Iterator[int]:
    """The process id of `tools.watch --web`, whose page is asked every POLL_S from here."""
    line = [sys.executable, "-m", "tools.watch", str(where), "--web"]
    process = subprocess.Popen(
        line, cwd=demo.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, encoding="utf-8"
    )
    stopped = threading.Event()
    try:
        found = re.search(r"http://\S+", process.stdout.readline() if process.stdout is not None else "")
        if found is None:
            raise ConfigError("tools.watch --web must print its address to be measured: it printed none")
        asking = threading.Thread(target=ask, args=(found[0].replace("/?", "/frame.json?"), stopped))
        asking.start()
        try:
            yield process.pid
        finally:
            stopped.set()
            asking.join()
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(url: str, stopped: threading.Event) -> None:
    while not stopped.is_set():
        with urllib.request.urlopen(url, timeout=60) as answer:
            json.loads(answer.read())
        stopped.wait(POLL_S)


def moment(where: Path, watch: int, version: int) -> Moment:
    """Now. Every actor leads a session of its own, with its workers; so do the tracker and the watch."""
    journals = Run(where).journals()
    actors = {line["pid"] for path in journals for line in run.lines(path, "start")}
    trackers = {pid for pid in processes() if is_tracker(pid, where)}
    if not trackers:
        raise ConfigError(f"the tracker must run to be measured: no process of tools.export reads {where}")
    parts = {"actors": actors, "tracker": trackers, "watch": {watch}}
    return Moment(time.time(), version, {part: cpu_s(leaders) for part, leaders in parts.items()})


def processes() -> list[int]:
    return [int(folder.name) for folder in PROC.iterdir() if folder.name.isdigit()]


def is_tracker(pid: int, where: Path) -> bool:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"tools.export" in words and str(where).encode() in words


def cpu_s(leaders: Collection[int]) -> float:
    """CPU seconds of all threads that now run in the sessions of these processes."""
    total = 0
    for pid in processes():
        with suppress(OSError):  # it ended
            session = int((PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[3])
            if session in leaders:
                for task in (PROC / str(pid) / "task").iterdir():
                    total += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return total / 1e9


def written_again(lines: list[Line], samples: list[Line]) -> float:
    """CPU seconds for these lines and samples, each by a write of its own: the least of some repeats."""
    taken: list[tuple[Event, dict[str, Any]]] = [
        (Event(line["event"]), {key: value for key, value in line.items() if key not in ENVELOPE})
        for line in lines
        if line["event"] not in (Event.START, Event.END)
    ]
    costs = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(prefix="areal-bus-bench-") as folder:
            journal = Journal(Path(folder), role="head", index=0, incarnation=0)
            kept = LineFile(Path(folder) / "samples.jsonl")
            began = time.process_time()
            for event, fields in taken:
                journal.write(event, **fields)
            for sample in samples:
                kept.append(compact(sample).encode())
            costs.append(time.process_time() - began)
            journal.close()
            kept.close()
    return min(costs)
