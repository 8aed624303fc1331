"""Stages of agents, closed at the end of a test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.workflows.loading import close_workflow
from tests.actors.endpoint.stage import MakeStage, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[MakeStage]:
    with contextlib.ExitStack() as stack:

        def make(function: str, **agent: Any) -> Stage:
            made = Stage(tmp_path, function, **agent)
            stack.callback(made.journal.close)
            stack.callback(close_workflow, made.workflow)
            return made

        yield make
