"""A line for people at the end of a rank: mpirun passes on nothing of its ranks once it was told to end itself."""

import contextlib
import os
import sys
from pathlib import Path

from launch.runs import newest_checkpoint

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


def saved(run: Path, n_ranks: int) -> str:
    """What a run that ends at once has on disk, and the command line that goes on with it."""
    start = f"mpirun -np {n_ranks} python" if n_ranks else "python"
    folder = newest_checkpoint(run)
    kept = f"{folder} is safe, what came after it is lost" if folder else "no checkpoint was written yet"
    where = "goes on from there" if folder else "begins again at version 0"
    first = f"to save first, use kill -USR1 $(cat {run}/pid) instead"
    return f"ends at once; {kept}; {start} -m areal_bus.launch --resume {run} {where}; {first}"
