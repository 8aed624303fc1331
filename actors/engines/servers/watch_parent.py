"""Runs a server and ends it with its parent: `python watch_parent.py COMMAND ...`.

The parent holds standard input open. Its end means that the parent has ended, also by SIGKILL. Then the server and all
its processes are killed; they hold no state to save. If this process is killed, the kernel kills the server. It imports
the standard library only, to stay small beside a generator.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(command: list[str]) -> int:
    """Run the server; returns its exit code. This process leads a session that contains all processes of the server."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    code = server.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # its remaining children
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_owner() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # this process is among them


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
