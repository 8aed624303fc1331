"""Progress that a restart does not undo, as each role reports it to its supervisor."""

import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from actors.head.shell import Shell
from actors.rewards.actor import RewardLoop
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.runtime.context import PROGRESS_FD, HeartbeatState
from actors.runtime.head_session import ActorRuntime, HeadSession
from areal_bus import messages as m
from areal_bus.core.effects import Record
from areal_bus.core.events import Event
from areal_bus.core.state import Phase
from areal_bus.storage.journal import Journal
from tests.actors.generator.test_delivery import a_generator
from tests.actors.head.test_shell import Wire, shell  # noqa: F401 (a fixture)
from tests.actors.rewards.test_actor import folder, trajectory  # noqa: F401 (a fixture)
from tests.faults.test_swaps import Mail
from tests.support.strangers import JOB, OpenBus

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


class Watched(OpenBus):
    """Notes, as verdicts leave, whether progress was reported before."""

    was_reported: bool | None = None

    def send_all(self, messages: Iterable[tuple[str, m.Message]]) -> None:
        self.was_reported = self.reported()
        super().send_all(messages)

    reported: Reported = staticmethod(lambda: False)


def test_a_reward_progresses_with_a_verdict_that_it_sent(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    reported: Reported,
) -> None:
    journal = Journal(tmp_path, role="reward", index=0, incarnation=0)
    head = OpenBus("head", job=JOB, listen=f"ipc://{folder}/head")
    bus = Watched("reward-0.0", job=JOB)
    bus.reported = reported
    try:
        bus.connect("head", head.endpoint)
        with WorkerPool(WorkerOrder("own_actor_rewards:score", str(folder)), n_workers=1, timeout_s=1.0) as pool:
            runtime = ActorRuntime(bus, HeadSession(bus, silent_s=60.0), journal, HeartbeatState())
            loop = RewardLoop(runtime, pool, capacity=1, n_generators=1)
            deadline = time.monotonic() + 60
            while not reported() and time.monotonic() < deadline:
                loop.turn()
                received = head.receive(0)
                if received and isinstance(received[1], m.Ready):  # so the head knows where it is
                    head.send("reward-0.0", trajectory(0, "fine"))
    finally:
        bus.close()
        head.close()
    assert bus.was_reported is False
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
