"""How a process, a rank and the job ended: exit codes in words, causes, RUN/summary.json; by start (`job`)."""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from actors.runtime.process import RESTART, signal_name
from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import read_object, write_atomic
from launch.run.runs import SUMMARY

CAUSE = "ended-by.json"  # in RUN: the rank that ended the job, and why


def write_cause(run: Path, job: str, cause: str) -> None:
    """Write why a rank ends the job, for the rank of the head: mpirun only sends it a signal."""
    with contextlib.suppress(OSError):
        write_atomic(run / CAUSE, json.dumps({"job": job, "cause": cause}) + "\n")


def sender_of(number: signal.Signals, n_ranks: int) -> str:
    """A signal as its sender knows it. `n_ranks`: of mpirun, which turns Ctrl-C into SIGTERM; 0 without mpirun."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    return "Ctrl-C or SIGTERM" if number == signal.SIGTERM and n_ranks else number.name


def cause_of(run: Path, job: str) -> str:
    """Why a rank of this start has ended the job; "" if none has."""
    try:
        found, summary = read_object(run / CAUSE), read_object(run / SUMMARY)
    except ConfigError:
        return ""
    if found.get("job", "") == job and found:
        return str(found["cause"])
    return str(summary.get("sentence", "")) if summary.get("code") and is_of(summary, job) else ""


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    return "asked for a restart" if code == RESTART else f"ended with exit code {code}"


def last_error(context: Context) -> str:
    """The last line of this incarnation's traceback in parentheses; "" without a traceback."""
    try:
        lines = (context.folder / "logs" / f"{context.name}.error.txt").read_text(encoding="utf-8").split("\n")
    except OSError:
        return ""
    return "".join(f" ({line.strip()})" for line in [line for line in lines if line.strip()][-1:])


def summary_exists(run: Path, job: str = "") -> bool:
    """Whether the head of this start has written RUN/summary.json. `job`: its id; "" for any."""
    try:
        return SUMMARY in names_in(run) and is_of(read_object(run / SUMMARY), job)
    except ConfigError:
        return False


def names_in(run: Path) -> set[str]:
    """The names in the folder: a network file system caches for a while that a file does not exist."""
    try:
        return set(os.listdir(run))
    except OSError:
        return set()


def is_of(summary: Mapping[str, Any], job: str) -> bool:
    """Whether it is of this start: a network file system may still show the summary of the last one."""
    return not job or summary.get("job", job) == job


def job_failed(run: Path, job: str = "") -> bool:
    """Whether the summary of this start has an error; False without one."""
    try:
        return (run / SUMMARY).exists() and is_of(found := read_object(run / SUMMARY), job) and bool(found["code"])
    except (ConfigError, KeyError):
        return True
