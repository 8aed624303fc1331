"""Rows 29 and 40 with a head in its own process: garbage does not end it, and many clients can connect.

What a bomb costs: tests/areal_bus/wire/test_codec.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_bus.transport.bus import Bus
from areal_bus.transport.rejections import STRIKES
from areal_bus.wire import codec
from tests.areal_bus.transport.test_listener import PATIENCE_S, crowd
from tests.support.strangers import JOB, dealer, next_of, word

ROOT = Path(__file__).resolve().parents[2]
ECHO = """
from areal_bus.transport.bus import Bus
head = Bus("head", job="job", listen="tcp://127.0.0.1:0")
print(head.endpoint, flush=True)
while True:
    sender, message = head.receive()
    head.send(sender, message)
"""


class House:
    """A head that answers all clients, and a friendly client that checks that it responds."""

    def __init__(self, pid: int, endpoint: str) -> None:
        self.pid, self.endpoint, self._n = pid, endpoint, 0
        self.friend = Bus("generator-0.0", job=JOB)
        self.friend.connect("head", endpoint)

    def answers(self) -> None:
        self._n += 1
        self.friend.send("head", word(self._n))
        assert next_of(self.friend) == ("head", word(self._n))


@contextmanager
def house() -> Iterator[House]:
    process = subprocess.Popen([sys.executable, "-c", ECHO], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        made = House(process.pid, process.stdout.readline().strip())
        made.answers()
        yield made
        made.friend.close(0)
    finally:
        process.kill()
        process.communicate()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=2000), min_size=1, max_size=12))
def test_row_29_no_bytes_of_any_shape_end_the_head(frames: list[bytes]) -> None:
    with dealer(shared().endpoint, b"generator-%d.0/0123456789abcdef" % (1000 + hash(tuple(frames)) % 10**6)) as one:
        one.send(*frames)
    shared().answers()


HOUSES: list[House] = []


def shared() -> House:
    return HOUSES[0]


@pytest.fixture(scope="module", autouse=True)
def open_house() -> Iterator[None]:
    with house() as head:
        HOUSES.append(head)
        yield
        HOUSES.clear()


def test_row_29_a_peer_that_keeps_sending_garbage_is_banned_and_ignored() -> None:
    with house() as head, dealer(head.endpoint) as bomber:
        for _ in range(STRIKES):
            bomber.send(b"\x91" * 60_000)
        head.answers()
        bomber.send(*codec.encode(word(0), job=JOB))  # a good one, too late
        head.answers()
        assert not bomber.socket.poll(200)


@pytest.mark.soak
@pytest.mark.parametrize("keys", [False, True])
def test_row_40_512_clients_at_once_are_all_received_within_a_minute(keys: bool) -> None:
    """No client's first message is lost (tests/areal_bus/transport/test_listener.py also tests ipc)."""
    assert crowd(16, 32, listen="tcp://127.0.0.1:0", keys=keys) < PATIENCE_S
