"""An actor's process: exit codes, the request to drain (SIGUSR1), and how it ends.

An actor starts with SIGUSR1 blocked, so that one which comes before anybody listens waits instead of killing it. Knows
nothing of what draining is.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

from areal_bus.errors import ActorFailed, CheckpointError, ConfigError, NonFinite, Restart, UserCodeFailed

DONE = 0  # told to stop by the head: the job is over. If it is not, the actor comes back, and that is counted
CRASHED = 1  # so does any other code and any signal: it comes back as a new incarnation, and is counted
BAD_INPUT = 2  # the user's input cannot run: so does no restart
OVER = 3  # the job has ended badly, for a reason that a restart would meet again
LEFT = 76  # asked to leave (SIGUSR1), and has left: it does not come back
RESTART = 75  # come back as a new incarnation; no failure, not counted


def code_of(error: Exception) -> int:
    """How a process ends by this error."""
    if isinstance(error, ConfigError):
        return BAD_INPUT
    if isinstance(error, ActorFailed | NonFinite | CheckpointError | UserCodeFailed):
        return OVER
    return RESTART if isinstance(error, Restart) else CRASHED


_asked = threading.Event()


def listen() -> None:
    """From now on SIGUSR1 is taken for the request, one that came before included. By the main thread."""
    signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def asked() -> bool:
    return _asked.is_set()


def leave(code: int) -> NoReturn:
    """Flush what was printed and end with `code`.

    The interpreter's end is left out on purpose: a thread of gloo or torch that then asks for the interpreter's lock is
    unwound through C++ frames, and the process aborts (SIGABRT, "terminate called without an active exception") after
    its work is done. Whatever must be closed or written is, before this is called.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # whoever read it is gone
            continue
    os._exit(code)
