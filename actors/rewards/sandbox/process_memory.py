"""Memory of a process and of all below it, read from /proc."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RESIDENT = 1  # field of /proc/PID/statm


def resident_bytes(root: int) -> int:
    """Resident bytes of the process `root` and its descendants; memory that they share counts for each."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            total += int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[RESIDENT]) * PAGE_BYTES
    return total


def descendants(root: int) -> Iterator[int]:
    """`root`, its children, their children, ... Not recursive: a program decides how deep they are."""
    left = [root]
    while left:
        pid = left.pop()
        yield pid
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                left += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split())
