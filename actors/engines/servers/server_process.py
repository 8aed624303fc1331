"""Runs a server as a child process, in a Python environment and on cores of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from actors.engines.servers import watch_parent
from actors.engines.servers.watch_parent import KILL_S, TERM_S, descriptors, processes
from areal_bus.errors import ConfigError, EngineLost

KEEPER = Path(watch_parent.__file__)
TAIL_BYTES = 1 << 16
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables that the server does not inherit
WORST = re.compile(r"\b\w*(?:Error|Exception)\b.*")
IN_USE = re.compile("address already in use|EADDRINUSE", re.IGNORECASE)
LISTENS = "0A"  # a state in /proc/net/tcp


END_S = TERM_S + KILL_S + 45.0  # in which `watch_parent` ends the server, also on a busy machine


class ServerProcess:
    """A running server. It ends with `close`, or when this process ends in any way."""

    def __init__(self, command: Sequence[str], log: Path, more: Mapping[str, str], *, port: int = 0) -> None:
        """Standard output and error go to `log`; `more` is added to the environment; it will listen on `port`."""
        self._log, self._port, self._n_starting = log, port, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(KEEPER), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={name: value for name, value in os.environ.items() if name not in NOT_THEIRS} | dict(more),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of `watch_parent`, which leads the process group of the server."""
        return self._process.pid

    def is_ready(self) -> None:
        """It serves: what it has logged until now explains no later end."""
        with contextlib.suppress(OSError):
            self._n_starting = self._log.stat().st_size

    def check(self) -> None:
        """Raises EngineLost if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineLost(f"the server {how_ended(code)}: {self.last_words()} (all of it: {self._log})")

    def last_words(self) -> str:
        """The last error in the log, else the last line; of a server that was ready, since then."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, self._n_starting))
            lines = log.read().decode(errors="replace").strip().splitlines()
            errors = [found.group() for line in lines if (found := WORST.search(line))]
            nothing = "it has said nothing since it was ready" if self._n_starting else "it has said nothing"
            return (errors or lines or [nothing])[-1][:300]
        return "it has left no log"

    def listens(self) -> bool:
        """Whether it is this server that listens on its port. Else another program took the port first."""
        sockets = listening(self._port)
        return not sockets or any(sockets & descriptors(pid) for pid in processes(self.pid))

    def lost_its_port(self) -> bool:
        """Whether it has ended because another program took its port, or an internal one."""
        if self._process.poll() is None:
            return False
        with contextlib.suppress(OSError):
            said = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            return bool(listening(self._port)) or IN_USE.search(said) is not None
        return False

    def close(self) -> None:
        """End it and all that it started: `watch_parent` asks it first, and removes what it leaves."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            for pid in [*processes(self.pid), self.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()


def how_ended(code: int) -> str:
    """The end of a server in words; `watch_parent` reports a signal as 128 + its number, as shells do."""
    if not 0 <= code <= 128:
        number = code - 128 if code > 0 else -code
        known = [one.name for one in signal.Signals if one == number]
        return f"was killed by {known[0] if known else f'signal {number}'}"
    return f"has ended with code {code}"


def listening(port: int) -> set[str]:
    """The sockets that listen on this port, as links in /proc/PID/fd show them."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for words in map(str.split, Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]):
                if words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found


def installed(python: str, *packages: str) -> str:
    """The version of the first of these packages in the interpreter's environment. Raises ConfigError with advice."""
    code = (
        "from importlib.metadata import distributions\n"
        "found = {at.metadata['Name'].lower().replace('_', '-'): at.version for at in distributions()}\n"
        f"print(next(found[name] for name in {packages!r} if name in found))"
    )
    advice = (
        f"make its environment (docs/engines.md) and set engine.python to its interpreter, or engine.urls; now {python}"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False, encoding="utf-8"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python must be an interpreter: {error}; {advice}") from None
    if done.returncode:
        raise ConfigError(f"rollout.engine needs {packages[0]}, which is not there: {advice}")
    return done.stdout.strip()


def interpreter(python: str, folder: Path) -> str:
    """The interpreter's path: relative to the working directory, else to `folder`; empty: that of this process."""
    if not python:
        return sys.executable
    given = Path(python).expanduser()
    if given.is_absolute() or not (folder / given).exists():
        return str(given.absolute())  # not resolved: an environment's interpreter is a link
    return str(given.absolute() if given.exists() else folder / given)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def core_set(part: int, n_parts: int, *, ranks: int) -> str:
    """CPU ids of one server of `n_parts` on this host, "0,2|4,6" by rank; "" if there are fewer cores than ranks."""
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
