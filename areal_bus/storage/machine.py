"""Identifies the machine of a process. Its host name does not: clones and pods share one."""

import contextlib
import fcntl
import functools
import itertools
import os
import socket
from pathlib import Path

BOOT_ID, NETWORK = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"
OWNER = "machine"  # file of a machine's folder: the machine whose living processes hold its lock


def machine() -> str:
    """Equal for two processes if a loopback address and a socket's path mean the same to both; "" if unknown."""
    try:
        return f"{Path(BOOT_ID).read_text(encoding='utf-8').strip()} {os.readlink(NETWORK)}"
    except OSError:
        return ""


@functools.cache  # one lock a process
def machine_folder(parent: Path) -> Path:
    """A folder that the processes of this machine share: HOST, or HOST-2, HOST-3, ... while living processes of other
    machines with that host name hold those before. A later start finds it again, also after a reboot. Raises OSError.
    """
    host = socket.gethostname()
    for number in itertools.count(1):
        folder = parent / (host if number == 1 else f"{host}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if _is_held_here(descriptor):
            return folder  # the descriptor, and so the lock, stays open until this process ends
        os.close(descriptor)
    raise AssertionError("unreachable")


def _is_held_here(descriptor: int) -> bool:
    """Take the lock, shared by this machine's processes; False if another has it. True on a disk without locks."""
    name = machine().encode()
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no living process holds it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, name, 0)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # held exclusively for as long as it takes to write a line
    except OSError:
        return True
    return os.pread(descriptor, len(name) + 1, 0) == name
