"""Waits for a condition that another thread or process brings about. The only place of tests that polls with sleep."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")
POLL_S = 0.01
TIMEOUT_S = 120.0  # for a loaded machine with two cores


def wait_until(
    condition: Callable[[], Value],
    what: str = "the condition holds",
    timeout_s: float = TIMEOUT_S,
    poll_s: float = POLL_S,
) -> Value:
    """The first true value of the condition. Raises TimeoutError with `what`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {timeout_s:g} s: {what}")
        time.sleep(poll_s)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not: its parent has only not asked yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
