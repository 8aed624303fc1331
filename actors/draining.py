"""Whether this job was asked to drain: the supervisor that holds the head passes SIGUSR1 on to it.

An actor starts with SIGUSR1 blocked, so that one which comes before anybody listens waits instead of killing it. Knows
nothing of what draining is.
"""

import signal
import threading

_asked = threading.Event()


def listen() -> None:
    """From now on SIGUSR1 is taken for the request, one that came before included. By the main thread."""
    signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def asked() -> bool:
    return _asked.is_set()
