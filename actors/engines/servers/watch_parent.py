"""Runs a server and ends it with its parent: `python watch_parent.py COMMAND ...`.

The parent holds standard input open. Its end means that the parent has ended, also by SIGKILL. The server is then asked
to end (SIGTERM), and killed with all its processes after TERM_S. What it leaves in shared memory and its sockets' files
are removed by name. If this process is killed, the kernel kills the server. It imports the standard library only, to
stay small beside a generator.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TERM_S = 5.0  # between SIGTERM and SIGKILL
KILL_S = 10.0  # in which killed processes end
POLL_S = 0.2
LOOK_S = 5.0  # between two looks at the server's files
MEMORY = "/dev/shm"
MAPPED = re.compile(rf"^(?:\S+ ){{4}}(\d+) +{MEMORY}/", re.MULTILINE)  # inodes in /proc/PID/maps


def main(command: list[str]) -> int:
    """Run the server; returns its exit code. This process leads a session that contains all processes of the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # In a process group of its own: SGLang kills its group when it fails.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent, process_group=0)
    names, began, looked = set[str](), time.time(), time.monotonic()
    try:
        while server.poll() is None and not _parent_has_ended():
            if time.monotonic() - looked > LOOK_S:
                names, looked = names | files_of(processes()), time.monotonic()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        names |= files_of(processes())
        _end(server)
        remove(names, began)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _parent_has_ended() -> bool:
    """Wait for POLL_S, or for the end of standard input."""
    ready, _, _ = select.select([0], [], [], POLL_S)
    return bool(ready) and not os.read(0, 4096)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(TERM_S)
    deadline = time.monotonic() + KILL_S
    while (left := processes()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        server.poll()
        time.sleep(0.01)
    server.wait()


def processes(leader: int = 0) -> list[int]:
    """Processes of a session that have not ended, without its leader. 0: of this one's."""
    found, leader = [], leader or os.getpid()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        state, *_, session = (_read(f"/proc/{pid}/stat").rpartition(")")[2].split() or ["Z", "0"])[:4]
        if int(session) == leader != pid and state != "Z":
            found.append(pid)
    return found


def files_of(pids: Iterable[int]) -> set[str]:
    """Paths of shared memory that these processes have mapped, and of their unix sockets.

    Shared memory is found by its inode: glibc makes a semaphore under another name than the one that it gets.
    """
    mapped, opened = set[int](), set[str]()
    for pid in pids:
        mapped.update(map(int, MAPPED.findall(_read(f"/proc/{pid}/maps"))))
        opened |= descriptors(pid)
    found = set[str]()
    with contextlib.suppress(OSError):
        found.update(entry.path for entry in os.scandir(MEMORY) if entry.inode() in mapped)
    for words in (line.split(maxsplit=7) for line in _read("/proc/net/unix").splitlines()[1:]):
        if len(words) == 8 and words[7].startswith("/") and f"socket:[{words[6]}]" in opened:
            found.add(words[7])
    return found


def _read(path: str) -> str:
    """A file of /proc; "" where its process has ended, or is another user's."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def descriptors(pid: int) -> set[str]:
    """What a process has open, as /proc shows it: "/path", "socket:[INODE]"."""
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def remove(names: Iterable[str], began: float) -> None:
    """Remove shared memory and sockets that are younger than the server and that no other process has open."""
    if not names:
        return
    for name in set(names) - files_of(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            about = os.lstat(name)
            if about.st_ctime >= began - 1 and (stat.S_ISSOCK(about.st_mode) or stat.S_ISREG(about.st_mode)):
                os.unlink(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
