"""How a process with torch threads ends: at once, without the interpreter's own end; knows nothing of what it did."""

import os
import sys
from typing import NoReturn


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
