"""The process from which a sweep forks its jobs (areal_lab/sweep/job_fork_server.py), as seen by the sweep."""

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial

from areal_bus.process.isolation import CHILD
from areal_bus.process.parent_death import die_with_parent

BACKLOG = 256  # jobs that connect before it serves
GRACE_S = 5.0


class JobServer:
    """Starts the server, which imports for some seconds. Jobs that start meanwhile wait for it."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        """`environment`: that of the jobs. `modules`: what they import besides the loops. The server ends with this
        process, and its jobs end with it.
        """
        self._address = f"areal-bus-sweep-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{self._address}")
            listener.listen(BACKLOG)
            self._process = subprocess.Popen(
                [*CHILD, "areal_lab.sweep.job_fork_server", str(listener.fileno()), str(os.getpid()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it through this process
                preexec_fn=partial(die_with_parent, os.getpid()),  # this process has one thread
            )

    @property
    def program(self) -> list[str]:
        """The beginning of a command. A module and its arguments follow, as after `python -m`."""
        return [*CHILD, "areal_lab.sweep.job_attendant", self._address]

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End it, and with it the jobs that still run."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
            return
        self._process.kill()
        self._process.wait()
