"""A generator that joined a running job ends without it: nobody else would end it when the job was killed."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.runtime import process
from actors.runtime.head_session import HeadSession
from areal_bus.errors import ActorFailed
from areal_bus.messages import HeadHeartbeat, Rejoin
from tests.support.generator_ring import WAIT_S, Ring, ring

PATIENCE_S = 1.5  # launch.timeout_s, above bus.silent_s


@contextmanager
def guest(folder: Path, **launch: float) -> Iterator[Ring]:
    with ring(folder, is_guest=True, launch=launch, bus={"silent_s": 0.5}) as around:
        yield around
        around.thread.join(WAIT_S)
        assert not around.thread.is_alive()


def test_a_guest_without_an_answer_from_a_head_ends_and_names_the_endpoint(tmp_path: Path) -> None:
    with guest(tmp_path, timeout_s=PATIENCE_S) as around:
        pass
    (error,) = around.failed
    assert isinstance(error, ActorFailed)
    assert re.search(rf"within launch.timeout_s = 1.5: {re.escape(around.context.head)} did not", str(error))


@pytest.mark.slow
def test_a_guest_whose_head_falls_silent_ends_after_the_time_that_a_head_may_take_to_come_back(tmp_path: Path) -> None:
    with guest(tmp_path, timeout_s=PATIENCE_S) as around:
        around.join()
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * PATIENCE_S:
            around.tell(HeadHeartbeat(0, 0))
            around.next_beat()
        assert around.thread.is_alive()
        silent = time.monotonic()
    assert time.monotonic() - silent > PATIENCE_S - 0.5
    assert f"timed out: the head at {around.context.head} was silent" in str(around.failed[0])


def test_a_guest_that_is_asked_to_leave_with_no_head_there_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(process, "_drain_requested", asked)
    asked.set()
    with guest(tmp_path, timeout_s=600.0) as around:
        pass
    assert around.failed == []
    assert around.journal()[-1]["reason"] == "asked to leave, with no head there"


class Line:
    """What Presence needs of a bus: how long the head has been silent."""

    def __init__(self) -> None:
        self.silent_s = 0.0

    def silence_s(self, peer: str) -> float:
        assert peer == "head"
        return self.silent_s


def test_a_guest_that_stood_still_itself_does_not_blame_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = Line()
    presence = HeadSession(line, silent_s=3.0)  # type: ignore[arg-type]
    presence.observe("head", Rejoin("who are you"))
    presence.give_up_after(10.0, "here")
    now, line.silent_s = 400.0, 300.0  # SIGSTOP, SIGCONT: heartbeats come in a moment
    presence.give_up_after(10.0, "here")
    for _ in range(5):
        now += 2.0
        presence.give_up_after(10.0, "here")
    now += 2.0
    with pytest.raises(ActorFailed, match="timed out: the head at here was silent"):
        presence.give_up_after(10.0, "here")
