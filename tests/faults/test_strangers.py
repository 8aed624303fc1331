"""Rows 27, 28, 30 and 31: unknown and hostile peers at every socket of a real job, over tcp with keys.

Row 29 is in tests/areal_bus/wire/test_codec.py and tests/areal_bus/transport/test_rejections.py, row 40 in
tests/areal_bus/transport/test_listener.py.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest

from areal_bus.messages import PROTOCOL, Cancel, Evict, Stop
from areal_bus.transport.curve import KeyPair, Keyring, new_pair
from areal_bus.wire import codec
from tests.areal_bus.transport.test_forgers import TRAJECTORY
from tests.faults.ring import Line, Ring
from tests.support.listening import Listener, listeners, of_the_launcher
from tests.support.strangers import RAW, canary, dealer, dial, say_raw, word

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Siege:
    """A run that was besieged while its learner was held, and then went on."""

    ring: Ring
    open_to: set[Listener]  # of all of its processes but mpirun's own
    cage: Path  # where a pickle that is loaded leaves a file
    began: float
    ended: float

    def refused(self, reason: str, sender: str | None = None) -> list[Line]:
        lines = self.ring.lines("refused", role="head", after=self.began, what="bytes", reason=reason)
        return [line for line in lines if sender in (None, line["sender"])]


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    folder = tmp_path_factory.mktemp("siege")
    cage = folder / "cage"
    cage.mkdir()
    ring = Ring(folder, "run.total_train_steps=8", "bus.transport=tcp", "bus.curve=on", "weights.route=gloo")
    ring.hold_learner(4)
    with ring.started():
        began = ring.wait_for("update", version=4)["t"]
        ring.wait_for_version(4, "generator-0.0", "generator-1.0")
        open_to = {one for one in listeners(ring.pids()) if not of_the_launcher(one)}
        of_the_bus = [one.port for who in ("head-0", "reward-0") for one in open_to if one.pid == ring.actor(who)[0]]
        ring.check(len(of_the_bus) == 2, f"head and reward listen at one port each: {of_the_bus}")
        for port in [one.port for one in open_to]:
            say_raw(f"tcp://127.0.0.1:{port}", [canary(cage / str(port)), *RAW.values()])
        with ExitStack() as stack:
            for port in of_the_bus:
                besiege(stack, f"tcp://127.0.0.1:{port}", ring)
            for reason in ("handshake", "key", "protocol", "role"):
                ring.wait_for("refused", after=began, what="bytes", reason=reason)
            ring.wait_for("refused", after=began, role="reward", reason="maker")
            ended = ring.wait_for("refused", after=began, sender="generator-0.0", reason="key")["t"]
            ring.hold_learner(None)
            ring.finish()
        yield Siege(ring, open_to, cage, began, ended)


def besiege(stack: ExitStack, endpoint: str, ring: Ring) -> None:
    """Idle connections; a key on no list; a guest's key under names that are not a guest's, and in another protocol."""
    for _ in range(100):
        stack.enter_context(dial(endpoint))
    guest = json.loads((ring.run / "join.json").read_text())
    server = {"head-0": guest["keys"]["head-0" if endpoint == guest["head"] else "reward-0"]}
    stranger = Keyring(new_pair(), server)
    as_guest = Keyring(KeyPair(guest["public_key"], guest["secret_key"]), server)
    message = codec.encode(word(1), job=guest["job"])
    for name, keys in ((b"generator-0.0", stranger), (b"generator-0.0", as_guest), (b"learner-0.0", as_guest)):
        stack.enter_context(dealer(endpoint, name + b"/0123456789abcdef", keys)).send(*message)
    speaks_tomorrows = stack.enter_context(dealer(endpoint, b"generator-66.0/0123456789abcdef", as_guest))
    speaks_tomorrows.send(msgpack.packb({"p": PROTOCOL + 1, "something": "new"}))
    forger = stack.enter_context(dealer(endpoint, b"generator-67.0/0123456789abcdef", as_guest))
    for forged in (Stop("forged"), Evict("forged"), Cancel(0, 0), TRAJECTORY):  # the last in generator-0.0's name
        forger.send(*codec.encode(forged, job=guest["job"]))


def test_the_besieged_run_is_whole(siege: Siege) -> None:
    siege.ring.check_survived()
    assert not siege.ring.lines("member", after=siege.began, state="dead")
    assert not siege.ring.lines("push_broken")


def test_row_27_a_stolen_name_is_refused_by_its_key(siege: Siege) -> None:
    assert siege.refused("key", "generator-0.0")
    assert siege.refused("key", "learner-0.0")
    assert (
        "a key authenticates the actors of its own rank only; this key does not authenticate generator-0.0"
        in siege.ring.output
    )


def test_row_28_a_peer_without_a_key_or_with_garbage_is_dropped_and_counted(siege: Siege) -> None:
    assert siege.refused("handshake")
    assert siege.refused("key", "127.0.0.1")
    assert siege.ring.output.count("head: rejected input of '127.0.0.1'") == 1


def test_the_guests_key_orders_nothing_and_forges_nothing(siege: Siege) -> None:
    """One Stop ended the reward for ever; forged samples of other generators were trained."""
    orders = siege.ring.lines("refused", role="reward", after=siege.began, sender="generator-67.0", reason="role")
    assert orders
    assert siege.ring.lines("refused", role="reward", after=siege.began, sender="generator-67.0", reason="maker")
    assert siege.refused("role", "generator-67.0")
    assert "reward-0.1" not in siege.ring.output
    assert not [
        line for line in siege.ring.lines("score", role="reward") if line["uid"] == 0 and line["t"] > siege.began
    ]


def test_row_30_a_pickle_at_every_port_is_never_loaded(siege: Siege) -> None:
    assert len(siege.open_to) >= 6  # head, reward, the store, and gloo in the learner and both generators
    assert {one.address for one in siege.open_to} == {"127.0.0.1"}
    assert list(siege.cage.iterdir()) == []


def test_row_31_another_protocol_is_refused_with_both_versions_named(siege: Siege) -> None:
    both = f"both sides must use protocol {PROTOCOL}; the peer uses {PROTOCOL + 1}"
    assert [line["why"] for line in siege.refused("protocol", "generator-66.0")] == [both]
    assert both in siege.ring.output
