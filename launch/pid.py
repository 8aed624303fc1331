"""RUN/pid: the process to signal for this job and no other (`kill -USR1 $(cat RUN/pid)` drains it); knows no signal.

It is the supervisor of rank 0, on its host; the file is gone once the job has ended, unless that was killed.
"""

import os
from pathlib import Path

from launch.runs import replace_file

PID = "pid"


class PidFile:
    """Of this process."""

    def __init__(self, run: Path) -> None:
        self._path = run / PID
        replace_file(self._path, f"{os.getpid()}\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
