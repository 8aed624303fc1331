"""Identifies the machine of a process. Its host name does not: clones and pods share one."""

import contextlib
import fcntl
import itertools
import os
import socket
from pathlib import Path
from typing import IO

BOOT_ID, NETWORK = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"
OWNER = "machine"  # file of a machine's folder: the machine whose living processes hold its lock
_held: list[IO[str]] = []  # locks of this process, until it ends


def machine() -> str:
    """Equal for two processes if a loopback address and a socket's path mean the same to both; "" if unknown."""
    try:
        return f"{Path(BOOT_ID).read_text(encoding='utf-8').strip()} {os.readlink(NETWORK)}"
    except OSError:
        return ""


def machine_folder(parent: Path) -> Path:
    """A folder that the processes of this machine share: HOST, or HOST-2, HOST-3, ... while living processes of other
    machines with that host name hold those before. A later start finds it again, also after a reboot. Raises OSError.
    """
    host = socket.gethostname()
    for number in itertools.count(1):
        folder = parent / (host if number == 1 else f"{host}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / OWNER).open("a+", encoding="utf-8")
        if _is_held_here(file):
            _held.append(file)
            return folder
        file.close()
    raise AssertionError("unreachable")


def _is_held_here(file: IO[str]) -> bool:
    """Take the lock, shared with this machine's processes. False when another machine has it. A file system without
    locks has free ones only.
    """
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody lives who holds it
            file.truncate(0)
            file.write(machine())
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)  # held exclusively for as long as it takes to write a line
    except OSError:
        return True
    file.seek(0)
    return file.read() == machine()
