"""Lists the listening sockets of a process tree from /proc, to test which ports a job opens."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"
EVERY_S = 2.0
LAUNCHERS = ("mpirun", "prterun", "prte", "prted")


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A listening tcp socket."""

    pid: int
    program: str  # the beginning of its command line
    address: str
    port: int


def family(pid: int) -> list[int]:
    """That process and its live descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Their listening tcp sockets, IPv4 and IPv6."""
    at = listening_inodes()
    found: set[Listener] = set()
    for pid in pids:
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:[") and target[8:-1] in at:
                        found.add(Listener(pid, program, *at[target[8:-1]]))
    return found


@contextmanager
def watched(pid: int) -> Iterator[set[Listener]]:
    """Collects the listeners of that process and its descendants, by polling until the block ends."""
    seen: set[Listener] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(EVERY_S):
            seen.update(listeners(family(pid)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def of_the_launcher(listener: Listener) -> bool:
    """Whether it belongs to Open MPI: mpirun and its daemons listen on all interfaces."""
    return listener.program.split(" ")[0].rpartition("/")[2] in LAUNCHERS


def listening_inodes() -> dict[str, tuple[str, int]]:
    """Address and port by inode, of this network namespace."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    address, _, port = fields[1].partition(":")
                    found[fields[9]] = (read_address(address), int(port, 16))
    return found


def read_address(text: str) -> str:
    """Four-byte words, each in this machine's order, in hexadecimal."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
