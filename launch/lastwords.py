"""A line for people at the end of a rank: mpirun passes on nothing of its ranks once it was told to end itself."""

import contextlib
import os
import sys
from pathlib import Path

STARTERS = ("mpirun", "mpiexec", "prterun", "prted")


def say(text: str) -> None:
    """To where mpirun itself writes, when it is our parent; else, and where that cannot be, as anything else."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in STARTERS:
            theirs = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with open(theirs, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            return
    print(text, file=sys.stderr, flush=True)
