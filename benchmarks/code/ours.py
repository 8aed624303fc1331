"""Our side of the bench `code`: canonical solutions scored in the sandbox, one after the other."""

import contextlib
import ctypes
import os
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

from actors.rewards import sandbox
from areal_code.scoring import CodeOptions, run_tests
from benchmarks.harness.worker_main import serve

PR_SET_CHILD_SUBREAPER = 36
OPTIONS = CodeOptions(score_s=60.0, test_s=20.0, memory_mib=4096)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PARENT, USER, SYSTEM = 1, 11, 12  # fields of /proc/PID/stat after the name
kill = sandbox.kill
killed_s = 0.0  # CPU seconds of processes killed with their namespace: os.wait does not report them


def levels() -> list[str]:
    """The levels of the sandbox that run here."""
    return ["bubblewrap", "rlimits"] if sandbox.find_level() == "bubblewrap" else ["rlimits"]


def solutions(rows: list[dict[str, Any]], level: sandbox.Level) -> dict[str, Any]:
    """Wall and CPU seconds for the canonical solutions of all rows, and how many pass."""
    wall, cpu = time.monotonic(), cpu_s()
    passed = sum(all(run_tests(row["canonical_solution"], row, OPTIONS, level=level)) for row in rows)
    return {"wall_s": time.monotonic() - wall, "cpu_s": cpu_s() - cpu, "passed": passed}


def cpu_s() -> float:
    """CPU seconds of this process and of all that it has started. The orphans of a sandbox are its children, too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + killed_s


def counted_kill(process: subprocess.Popen[bytes], mark: str, level: sandbox.Level) -> None:
    """`sandbox.kill`, after the processes of the namespace have been counted."""
    global killed_s
    began = time.process_time()
    if level == "bubblewrap":
        killed_s += sum(seconds for first in children(process.pid) for seconds in below(first[0]))
    killed_s -= time.process_time() - began  # the cost of the count itself
    kill(process, mark, level)


def below(parent: int) -> list[float]:
    """CPU seconds of all processes below `parent`."""
    return [s for pid, seconds in children(parent) for s in (seconds, *below(pid))]


def children(parent: int) -> list[tuple[int, float]]:
    """Process id and CPU seconds of each child."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[PARENT]) == parent:
                found.append((int(pid), (int(fields[USER]) + int(fields[SYSTEM])) * TICK_S))
    return found


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    sandbox.kill = counted_kill
    serve({"levels": levels, "solutions": solutions})
