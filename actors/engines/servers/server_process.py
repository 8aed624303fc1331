"""Runs a server as a child process, in a Python environment of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_bus.errors import ConfigError, EngineLost

KEEPER = Path(__file__).with_name("watch_parent.py")
TAIL_BYTES = 1 << 16
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # variables that the server does not inherit
WORST = re.compile(r"\b\w*(?:Error|Exception)\b.*")


class ServerProcess:
    """A running server. It ends with `close`, or when this process ends in any way."""

    def __init__(self, command: Sequence[str], log: Path, more: Mapping[str, str]) -> None:
        """Standard output and error go to `log`; `more` is added to the environment."""
        self._log = log
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

    def check(self) -> None:
        """Raises EngineLost if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineLost(f"the server has ended with code {code}: {self.last_words()} (all of it: {self._log})")

    def last_words(self) -> str:
        """The last error in the log, else the last line."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()
            errors = [found.group() for line in lines if (found := WORST.search(line))]
            return (errors or lines or ["it has said nothing"])[-1][:300]
        return "it has left no log"

    def close(self) -> None:
        """Kill it and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


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
    """A port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
