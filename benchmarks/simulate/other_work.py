"""Cores that programs outside of a job use while it runs: on a machine with other work a bench measures both."""

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.1  # cores that other programs may use beside a job on a quiet machine
STAT = Path("/proc/stat")
IDLE = 3, 4, 8, 9  # of the columns of a cpu line: idle, iowait; guests are part of user


@dataclass(slots=True)
class OtherWork:
    """`cores`: mean use by other programs. None where the system does not count it, and until the end."""

    cores: float | None = None


@contextmanager
def other_work() -> Iterator[OtherWork]:
    """Measure while the body starts child processes and waits for their end."""
    found = OtherWork()
    began, machine_s, own_s = time.monotonic(), machine_cpu_s(), own_cpu_s()
    yield found
    if machine_s is not None:
        used_s = (machine_cpu_s() or machine_s) - machine_s - (own_cpu_s() - own_s)
        found.cores = max(0.0, used_s / (time.monotonic() - began))


def machine_cpu_s() -> float | None:
    """CPU seconds of all programs since the machine started, with the time that its host took (steal). Linux only."""
    try:
        line = STAT.read_text(encoding="ascii").partition("\n")[0]
        ticks = [int(word) for word in line.split()[1:]]
    except (OSError, ValueError):
        return None
    return sum(n for at, n in enumerate(ticks) if at not in IDLE) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended, with theirs."""
    uses = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in uses)
