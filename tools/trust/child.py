"""Runs a program or a job to its end, with a log of its output and lines of progress."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.process.commands import mpirun_variables
from areal_bus.process.isolation import child_path
from tools import terminal

LAST_LINES = 15  # of a run that failed


def run_to_end(command: Sequence[str], log: Path) -> None:
    """Run a command; its output goes to the log. Raises ConfigError with its last lines when it fails."""
    began = time.monotonic()
    one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": child_path(), "PYTHONUTF8": "1"}  # as every actor on a CPU
    with log.open("wb") as out:
        done = subprocess.run(
            command, env=os.environ | mpirun_variables() | one_thread, stdout=out, stderr=out, check=False
        )
    if done.returncode:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise ConfigError(f"failed run, exit code {done.returncode} ({log}), last lines:\n{terminal.printable(last)}")
    say(f"done in {time.monotonic() - began:.1f} s")


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
