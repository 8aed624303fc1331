"""An actor's process: exit codes, signals (SIGUSR1 drains, SIGUSR2 profiles; blocked until handled), the exit."""

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

from areal_bus import errors

DONE = 0  # the head sent Stop. If the job is not over, the actor is restarted and the restart is counted
CRASHED = 1  # as any other code and any signal: restarted as a new incarnation and counted
BAD_INPUT = 2  # invalid user input: not restarted
OVER = 3  # the job has failed for a reason that a restart would not change
LEFT = 76  # drained on request (SIGUSR1), or evicted for good: not restarted
RESTART = 75  # restart as a new incarnation; not a failure, not counted


def code_of(error: Exception) -> int:
    if isinstance(error, errors.ConfigError):
        return BAD_INPUT
    if isinstance(error, errors.ActorFailed | errors.NonFinite | errors.CheckpointError | errors.UserCodeFailed):
        return OVER
    if isinstance(error, errors.EvictedForGood):
        return LEFT
    return RESTART if isinstance(error, errors.Restart) else CRASHED


_drain_requested = threading.Event()


def listen_for_drain() -> None:
    """Handle SIGUSR1 from now on, a pending one included. Call it on the main thread."""
    signal.signal(signal.SIGUSR1, lambda *_: _drain_requested.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def drain_requested() -> bool:
    return _drain_requested.is_set()


_profile_requested = threading.Event()


def listen_for_profile(name: str, *, records: bool) -> None:
    """Handle SIGUSR2 from now on. An actor that records nothing prints so and goes on. Call it on the main thread."""
    line = f"{name}: SIGUSR2 records learners and generators only\n".encode()
    signal.signal(signal.SIGUSR2, lambda *_: _profile_requested.set() if records else _print(line))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def _print(line: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(2, line)


def take_profile_request() -> bool:
    """Whether a recording was requested since the last call."""
    if not _profile_requested.is_set():
        return False
    _profile_requested.clear()
    return True


def leave(code: int) -> NoReturn:
    """Flush the streams and exit with `code`, without the interpreter's shutdown (gloo may abort): close all before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone
            continue
    os._exit(code)


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 35" for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
