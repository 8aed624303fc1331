"""Rows 29 and 40 with a head in its own process: garbage does not end it, and many clients can connect.

What a bomb costs: tests/areal_bus/wire/test_codec.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.transport.bus import Bus
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


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The endpoint of a head that answers all clients."""
    with subprocess.Popen([sys.executable, "-c", ECHO], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture(scope="module")
def friend(head: str) -> Iterator[Bus]:
    bus = Bus("generator-0.0", job=JOB)
    bus.connect("head", head)
    yield bus
    bus.close(0)


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(st.binary(max_size=2000), min_size=1, max_size=12))
def test_row_29_no_bytes_of_any_shape_end_the_head(head: str, friend: Bus, frames: list[bytes]) -> None:
    n = hash(tuple(frames)) % 10**6
    with dealer(head, b"generator-%d.0/0123456789abcdef" % (1000 + n)) as one:
        one.send(*frames)
    friend.send("head", word(n))
    assert next_of(friend) == ("head", word(n))


@pytest.mark.soak
@pytest.mark.parametrize("keys", [False, True])
def test_row_40_512_clients_at_once_are_all_received_within_a_minute(keys: bool) -> None:
    """No client's first message is lost (tests/areal_bus/transport/test_listener.py also tests ipc)."""
    assert crowd(16, 32, listen="tcp://127.0.0.1:0", keys=keys) < PATIENCE_S
