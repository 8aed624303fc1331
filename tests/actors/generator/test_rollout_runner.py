"""The episodes of a generator: each has a row of its own."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import Request
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.runtime.user_failures import MIN_FAILURES, Failures
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus.config.sections import Config
from areal_bus.errors import EngineError, UserCodeFailed
from areal_bus.messages import ATTEMPTS, Prompt, SampleFailed
from areal_bus.storage.journal import Journal


class Requests:
    """An engine that keeps requests and ends none."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self, key: object) -> None:
        """It ends none."""


class Changing:
    """A workflow that changes its row, also deep inside."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def episode(self, row: Row, ask: Ask) -> Episode:
        self.seen.append((row["question"], list(row["hints"])))
        row["hints"].append("used")  # type: ignore[index]
        row["question"] += "!"  # type: ignore[index]
        return Episode((await ask([65])).text)


def test_a_samples_change_of_its_row_is_not_seen_by_the_next_sample(tmp_path: Path) -> None:
    journal = Journal(tmp_path, role="generator", index=0, incarnation=0)
    workflow, engine = Changing(), Requests()
    runner = RolloutRunner(engine, workflow, None, Config(), RolloutLog("generator-0.0", journal))  # type: ignore[arg-type]
    assert list(runner.begin(Prompt(0, 0, 0, [0, 1, 2], "", '{"question": "q", "hints": []}'))) == []
    assert workflow.seen == [("q", [])] * 3
    assert len(engine.requests) == 3


RAISING = """
class Flow:
    async def episode(self, row, ask):
        raise ValueError("bad row")
"""


@pytest.mark.parametrize("term", [0, 1])
def test_only_first_tries_of_a_prompt_in_its_term_count_as_failures_of_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: int
) -> None:
    """A prompt that failed elsewhere comes as the next attempt: the row may be the cause, not the workflow."""
    (tmp_path / f"raising_{term}.py").write_text(RAISING, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    workflow = importlib.import_module(f"raising_{term}").Flow()
    journal = Journal(tmp_path, role="generator", index=0, incarnation=0)
    log = RolloutLog("generator-0.0", journal, Failures(tmp_path / "logs", "generator-0.0", "workflow.function"))
    runner = RolloutRunner(Requests(), workflow, None, Config(), log)  # type: ignore[arg-type]

    def fail(uid: int, attempt: int) -> None:
        (outcome,) = runner.begin(Prompt(uid, term * ATTEMPTS + attempt, 0, [0], "", "{}"))
        assert isinstance(outcome, SampleFailed)

    for uid in range(5 * MIN_FAILURES):
        fail(uid, 1)
    for uid in range(MIN_FAILURES - 1):
        fail(uid, 0)
    with pytest.raises(UserCodeFailed, match="bad row"):
        fail(100, 0)


class Broken(Requests):
    """An engine whose device is in error."""

    def submit(self, request: Request) -> None:
        raise EngineError("the device is in error")


class Asking:
    """A workflow that is right."""

    async def episode(self, row: Row, ask: Ask) -> Episode:
        return Episode((await ask([65])).text)


def test_an_engine_that_fails_is_no_failure_of_the_workflow_and_ends_no_job(tmp_path: Path) -> None:
    """Alone at the start, while other generators still load: the head pauses it when others succeed."""
    failures = Failures(tmp_path / "logs", "generator-0.0", "workflow.function")
    log = RolloutLog("generator-0.0", Journal(tmp_path, role="generator", index=0, incarnation=0), failures)
    runner = RolloutRunner(Broken(), Asking(), None, Config(), log)  # type: ignore[arg-type]
    for uid in range(5 * MIN_FAILURES):
        (outcome,) = runner.begin(Prompt(uid, 0, 0, [0], "", "{}"))
        assert isinstance(outcome, SampleFailed)
        assert "the device is in error" in outcome.error


class Ending:
    """A workflow that ends its sample as a program ends, or raises when it is cancelled."""

    def __init__(self, error: BaseException, *, at_once: bool) -> None:
        self.error, self.at_once = error, at_once

    async def episode(self, row: Row, ask: Ask) -> Episode:
        if self.at_once:
            raise self.error
        try:
            return Episode((await ask([65])).text)
        finally:
            raise self.error


ENDS = [SystemExit(2), asyncio.CancelledError(), RuntimeError("\ud83d")]


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_a_workflow_that_exits_fails_its_sample_and_not_its_generator(tmp_path: Path, error: BaseException) -> None:
    log = RolloutLog("generator-0.0", Journal(tmp_path, role="generator", index=0, incarnation=0))
    runner = RolloutRunner(Requests(), Ending(error, at_once=True), None, Config(), log)  # type: ignore[arg-type]
    (outcome,) = runner.begin(Prompt(0, 0, 0, [0, 1], "", "{}"))
    assert isinstance(outcome, SampleFailed)
    assert outcome.error.startswith(type(error).__name__)
    assert runner.n_live == 0


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_a_workflow_that_raises_while_it_is_cancelled_ends_nothing(tmp_path: Path, error: BaseException) -> None:
    log = RolloutLog("generator-0.0", Journal(tmp_path, role="generator", index=0, incarnation=0))
    runner = RolloutRunner(Requests(), Ending(error, at_once=False), None, Config(), log)  # type: ignore[arg-type]
    assert list(runner.begin(Prompt(0, 0, 0, [0, 1], "", "{}"))) == []
    runner.cancel("", 0, 0)
    assert runner.n_live == 0
