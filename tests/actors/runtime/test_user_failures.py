"""Failures of user code: when they end the job."""

from pathlib import Path

import pytest

from actors.runtime.user_failures import MIN_FAILURES, Failures
from areal_bus.errors import UserCodeFailed


def failures(folder: Path) -> Failures:
    return Failures(folder / "logs", "generator-0.0", "workflow.function = 'mine:Flow'")


def fail(them: Failures, group: int, *, counts: bool = True) -> None:
    them.note(group=group, about=f"uid {group}", place="mine.py:7", error="no", trace="Traceback", counts=counts)


def test_code_that_never_succeeds_ends_the_job_after_eight_failures_of_four_prompts(tmp_path: Path) -> None:
    them = failures(tmp_path)
    for n in range(MIN_FAILURES - 1):
        fail(them, n % 4)
    with pytest.raises(UserCodeFailed, match=r"failed for 8 samples of 4 prompts or more at the same place"):
        fail(them, 0)


def test_prompts_that_failed_elsewhere_before_do_not_count(tmp_path: Path) -> None:
    """A bad row goes from one generator to the next, and would end them all."""
    them = failures(tmp_path)
    for n in range(10 * MIN_FAILURES):
        fail(them, n, counts=False)
    for n in range(MIN_FAILURES - 1):
        fail(them, n)
    with pytest.raises(UserCodeFailed):
        fail(them, 0)


def test_code_that_has_succeeded_once_does_not_end_the_job(tmp_path: Path) -> None:
    them = failures(tmp_path)
    them.note_success()
    for n in range(10 * MIN_FAILURES):
        fail(them, n)
