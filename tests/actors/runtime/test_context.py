"""Progress that a restart does not undo, as each role reports it to its supervisor."""

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.head.shell import Shell
from actors.runtime.context import PROGRESS_FD
from areal_bus import messages as m
from areal_bus.core.effects import Record
from areal_bus.core.events import Event
from areal_bus.core.state import Phase
from tests.actors.generator.test_delivery import a_generator
from tests.actors.head.test_shell import Wire, shell  # noqa: F401 (a fixture)
from tests.faults.test_swaps import Mail

Reported = Callable[[], bool]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    """Whether the supervisor of the next actor of this process has heard of progress."""
    read, write = os.pipe()
    monkeypatch.setenv(PROGRESS_FD, str(write))
    yield lambda: bool(select.select([read], [], [], 0)[0])
    os.close(read)


def test_a_generator_progresses_with_an_acknowledged_trajectory_and_with_no_token(
    tmp_path: Path, reported: Reported
) -> None:
    mail = Mail()
    generator = a_generator(tmp_path, mail, n_live=10)
    for _ in range(6):
        generator.turn()
    sent = [message for message in mail.sent if isinstance(message, m.Trajectory)]
    assert sent
    mail.waiting.append(("head", m.Ack(99, 0, 0, "")))  # of no trajectory of this generator
    generator.turn()
    assert not reported()
    mail.waiting.append(("head", m.Ack(sent[0].uid, sent[0].sample, sent[0].attempt, sent[0].evaluation)))
    generator.turn()
    assert reported()


def test_a_head_progresses_with_updates_and_kept_evaluations_and_with_no_verdict(
    tmp_path: Path,
    reported: Reported,
    request: pytest.FixtureRequest,
) -> None:
    head: Shell = request.getfixturevalue("shell")
    wire = Wire(tmp_path)

    def carry_out(event: Event) -> None:
        head._carry_out(wire, [Record(event, {})])  # type: ignore[arg-type]

    carry_out(Event.SCORED)
    head.state.phase = Phase.AFTER
    carry_out(Event.EVALUATION)
    assert not reported()
    carry_out(Event.UPDATE)
    assert reported()
