"""The episodes of a generator: each has a row of its own."""

from pathlib import Path
from typing import Any

from actors.engines.protocol import Request
from actors.generator.rollout_runner import RolloutLog, RolloutRunner
from actors.workflows.protocol import Ask, Episode, Row
from areal_bus.config.sections import Config
from areal_bus.messages import Prompt
from areal_bus.storage.journal import Journal


class Requests:
    """An engine that keeps requests and ends none."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)


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
