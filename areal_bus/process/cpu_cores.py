"""Splits the cores of a host between the servers of its generators, for servers that pin their threads."""

import os
from itertools import pairwise
from pathlib import Path

TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def core_set(part: int, n_parts: int, *, ranks: int) -> str:
    """The cores of one server out of `n_parts` on this host: CPU ids like "0,2|4,6", a set for each of its ranks; ""
    if there are fewer cores than ranks.
    """
    cores, n_sets = physical_cores(sorted(os.sched_getaffinity(0))), n_parts * ranks
    if len(cores) < n_sets:
        return ""
    at = [len(cores) * i // n_sets for i in range(part * ranks, (part + 1) * ranks + 1)]
    return "|".join(",".join(map(str, cores[begin:end])) for begin, end in pairwise(at))


def physical_cores(cpus: list[int]) -> list[int]:
    """The first of these logical CPUs on each physical core."""
    first: dict[str, int] = {}
    for cpu in cpus:
        first.setdefault(siblings(cpu), cpu)
    return list(first.values())


def siblings(cpu: int) -> str:
    """The logical CPUs on the core of this one."""
    try:
        return Path(TOPOLOGY.format(cpu)).read_text(encoding="utf-8").strip()
    except OSError:
        return str(cpu)
