"""Keeps a server that dies with whoever started it: `python watch_parent.py COMMAND ...`, standard input held open by
them.

The end of standard input means that they are gone, however that came (SIGKILL, too): the server and all its processes
are killed, for they have nothing to lose. Should this process be killed, the kernel kills the server. Standard library
only, and nothing of ours: it runs while a generator's memory is full.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(command: list[str]) -> int:
    """The server's exit code. This process leads a session of its own, in which all of the server's are."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    code = server.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # what it has left behind
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_owner() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # this process is among them


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
