"""Whose key may speak as whom: the list itself, and two real ends that keep to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.runtime.context import Context
from areal_bus.config.sections import BusConfig, TopologyConfig
from areal_bus.errors import ConfigError, WireError
from areal_bus.messages import Role, Stop
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import KeyPair, Keyring, new_pair
from areal_bus.transport.listener import GONE
from launch.plan.network import HostFacts, peer_keys, uses_curve
from launch.plan.topology import ActorId, plan
from tests.faults.proxy import Proxy
from tests.support.polling import wait_until
from tests.support.strangers import JOB, next_of, word

HEAD, FIRST, SECOND, LATE = new_pair(), new_pair(), new_pair(), new_pair()
SEATS = {"head-0": HEAD.public, "generator-0": FIRST.public, "generator-1": SECOND.public}


@contextmanager
def head_at(listen: str, *, seats: dict[str, str] | None = None, own: KeyPair | None = HEAD) -> Iterator[Bus]:
    """A head with keys; without a pair of its own, one that asks for none."""
    bus = Bus("head", job=JOB, listen=listen, keys=Keyring(own, SEATS if seats is None else seats) if own else None)
    try:
        yield bus
    finally:
        bus.close()


@contextmanager
def actor_at(head: Bus, name: str, own: KeyPair | None, server: str = HEAD.public) -> Iterator[Bus]:
    """An actor that is connected and has said Ack(0)."""
    bus = Bus(name, job=JOB, keys=Keyring(own, {"head-0": server}) if own else None)
    bus.connect("head", head.endpoint)
    bus.send("head", word(0))
    try:
        yield bus
    finally:
        bus.close(0)


WHOSE = {"head": HEAD, "first": FIRST, "wildcard": LATE, "stranger": new_pair(), "none": None}


@pytest.mark.parametrize(
    ("whose", "name", "is_its"),  # not the key: an id must be the same in every worker of pytest-xdist
    [
        ("first", "generator-0.0", True),
        ("first", "generator-0.7", True),  # in every incarnation
        ("first", "generator-1.0", False),
        ("first", "generator-00.0", False),
        ("first", "head", False),
        ("none", "generator-0.0", False),
        ("stranger", "generator-9.0", False),
        ("head", "learner-0.0", True),  # one key may have several seats
        ("wildcard", "generator-2.0", True),  # a wildcard has those that are not listed
        ("wildcard", "generator-1.0", False),
        ("wildcard", "reward-0.0", False),
    ],
)
def test_a_key_authenticates_its_own_seats_alone(whose: str, name: str, is_its: bool) -> None:
    keys = Keyring(HEAD, SEATS | {"learner-0": HEAD.public, "generator-*": LATE.public})
    pair = WHOSE[whose]
    assert keys.authenticates("" if pair is None else pair.public, name) is is_its
    assert keys.key_of("head") == keys.key_of("learner-0.3") == HEAD.public


def test_connecting_to_a_peer_without_a_key_is_refused() -> None:
    with pytest.raises(WireError, match=r"missing public key of 'reward-7.0'"):
        Keyring(HEAD, SEATS).key_of("reward-7.0")


NO_KEYS = {
    "nothing": "",
    "short": "x",
    "long": "x" * 41,
    "other letters": "\N{GREEK SMALL LETTER ALPHA}" * 40,
    "one other letter": HEAD.public[:-1] + "~",
}


@pytest.mark.parametrize("what", NO_KEYS)
def test_an_invalid_curve_key_is_refused(what: str) -> None:
    key = NO_KEYS[what]
    with pytest.raises(ConfigError, match="40 characters of Z85"):
        Keyring(HEAD, {"generator-0": key})
    with pytest.raises(ConfigError, match="40 characters of Z85"):
        Keyring(HEAD, SEATS).allow("generator-2", key)


def test_a_context_carries_its_keys_and_prints_no_secret() -> None:
    plain = Context(
        role="generator", index=0, incarnation=0, rank=2, job=JOB, head="tcp://127.0.0.1:1", address="127.0.0.1",
        interface="lo", device="cpu", n_generators=1, n_rewards=1, n_learners=1, run_folder="/run",
        config_folder="/config", model_folder="/model",
    )  # fmt: skip
    assert plain.keyring() is None
    context = Context.from_json(
        replace(plain, public_key=FIRST.public, secret_key=FIRST.secret, keys={"head-0": HEAD.public}).to_json()
    )
    assert FIRST.secret not in repr(context)
    assert (HEAD.secret in repr(HEAD), HEAD.public in repr(HEAD)) == (False, True)
    keys = context.keyring()
    assert keys is not None
    assert keys.own == FIRST
    assert keys.key_of("head") == HEAD.public


@pytest.mark.parametrize(
    ("settings", "hosts", "address", "wanted"),
    [
        ({}, ["a"], "127.0.0.1", False),
        ({"transport": "tcp"}, ["a"], "127.0.0.1", False),
        ({"transport": "tcp", "curve": "on"}, ["a"], "127.0.0.1", True),
        ({"curve": "on"}, ["a"], "127.0.0.1", True),
        ({"interface": "eth0"}, ["a"], "10.0.0.1", True),
        ({"interface": "eth0"}, ["a", "b"], "10.0.0.1", True),
        ({"interface": "eth0", "curve": "off"}, ["a", "b"], "10.0.0.1", False),
    ],
)
def test_connections_are_encrypted_where_others_can_reach_them(
    settings: dict[str, str], hosts: list[str], address: str, wanted: bool
) -> None:
    facts = [HostFacts(host, {"eth0": address}) for host in hosts]
    assert uses_curve(BusConfig.model_validate(settings), facts, [("eth0", address)] * len(hosts)) is wanted


def test_an_actor_gets_the_keys_of_those_it_talks_to_only() -> None:
    facts = [HostFacts("a", {}, key=f"key-{rank}") for rank in range(4)]
    places = plan(TopologyConfig(), ["a"] * 4)
    assert peer_keys(ActorId(Role.LEARNER, 0), places, facts) == {"head-0": "key-0"}
    assert peer_keys(ActorId(Role.GENERATOR, 0), places, facts) == {"head-0": "key-0", "reward-0": "key-1"}
    assert peer_keys(ActorId(Role.REWARD, 0), places, facts) == {
        "head-0": "key-0", "generator-0": "key-2", "generator-1": "key-3",
    }  # fmt: skip
    assert peer_keys(ActorId(Role.HEAD, 0), places, facts) == {
        "learner-0": "key-0", "reward-0": "key-1", "generator-0": "key-2", "generator-1": "key-3",
    }  # fmt: skip


STRANGERS = {
    "a key on no list": (new_pair(), HEAD.public, "key"),
    "no key": (None, HEAD.public, "handshake"),
    "another server's key": (FIRST, SECOND.public, "handshake"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_peer_with_a_wrong_curve_key_is_refused_and_counted(stranger: str) -> None:
    own, server, reason = STRANGERS[stranger]
    with head_at("tcp://127.0.0.1:0") as head, actor_at(head, "generator-0.0", FIRST) as actor:
        assert next_of(head) == ("generator-0.0", word(0))
        with actor_at(head, "generator-1.0", own, server):
            wait_until(lambda: reason in {why for _, why in head.refused}, "it is counted")
            actor.send("head", word(1))
            assert next_of(head) == ("generator-0.0", word(1))
        assert {peer for peer, _ in head.refused} <= {"127.0.0.1", GONE}
        assert head.receive(0) is None


@pytest.mark.parametrize("first", ["the thief", "the owner"])
def test_a_stolen_name_is_refused_and_its_owner_stays_connected(first: str) -> None:
    with head_at("tcp://127.0.0.1:0") as head:
        if first == "the owner":
            with actor_at(head, "generator-0.0", FIRST) as owner, actor_at(head, "generator-0.0", SECOND) as thief:
                check_theft(head, owner, thief)
        else:
            with actor_at(head, "generator-0.0", SECOND) as thief:
                wait_until(lambda: head.refused["generator-0.0", "key"], "the thief is refused")
                with actor_at(head, "generator-0.0", FIRST) as owner:
                    check_theft(head, owner, thief)


def check_theft(head: Bus, owner: Bus, thief: Bus) -> None:
    wait_until(lambda: head.refused["generator-0.0", "key"], "the thief is refused")
    assert next_of(head) == ("generator-0.0", word(0))  # the owner's
    thief.send("head", Stop("by the thief"))
    owner.send("head", word(1))
    assert next_of(head) == ("generator-0.0", word(1))
    head.send("generator-0.0", word(2))
    assert next_of(owner) == ("head", word(2))
    wait_until(lambda: head.refused["generator-0.0", "key"] == 2, "the thief's second message is refused")
    assert thief.receive(0) is None
    assert head.receive(0) is None


def test_a_late_peer_is_admitted_once_its_key_is_allowed() -> None:
    with head_at("tcp://127.0.0.1:0") as head:
        with actor_at(head, "generator-2.0", LATE):
            wait_until(lambda: head.refused["127.0.0.1", "key"], "it is refused")
        head.allow("generator-2", LATE.public)
        with actor_at(head, "generator-2.0", LATE):
            assert next_of(head) == ("generator-2.0", word(0))


def test_no_key_is_allowed_where_none_is_asked_for(tmp_path: Path) -> None:
    with head_at(f"ipc://{tmp_path}/s", own=None) as head, pytest.raises(ConfigError, match=r"bus\.curve"):
        head.allow("generator-2", FIRST.public)


def test_a_reward_without_a_key_is_refused_and_the_rest_goes_on() -> None:
    with head_at("tcp://127.0.0.1:0") as head, actor_at(head, "generator-0.0", FIRST) as actor:
        actor.connect("reward-0.0", head.endpoint)
        actor.connect("reward-1.0", "nonsense://")
        wait_until(lambda: len(actor.refused) == 2, "both are counted")
        assert set(actor.refused) == {("reward-0.0", "endpoint"), ("reward-1.0", "endpoint")}
        head_has = [next_of(head)]
        actor.send("head", word(1))
        assert [*head_has, next_of(head)] == [("generator-0.0", word(0)), ("generator-0.0", word(1))]


def test_without_keys_a_name_stays_with_its_first_connection_until_that_is_gone(tmp_path: Path) -> None:
    with head_at(f"ipc://{tmp_path}/s", own=None) as head:
        with actor_at(head, "generator-0.0", None) as owner:
            assert next_of(head) == ("generator-0.0", word(0))
            with actor_at(head, "generator-0.0", None):
                wait_until(lambda: head.refused["generator-0.0", "taken"], "the second one is refused")
                head.send("generator-0.0", word(1))
                assert next_of(owner) == ("head", word(1))  # and nothing of what asked whether it is there
        with actor_at(head, "generator-0.0", None):
            assert next_of(head) == ("generator-0.0", word(0))


def test_a_reconnecting_peer_with_a_key_is_received_while_its_half_open_connection_remains() -> None:
    with head_at("tcp://127.0.0.1:0") as head:
        proxy = Proxy(head.endpoint)
        actor = Bus("generator-0.0", job=JOB, keys=Keyring(FIRST, {"head-0": HEAD.public}))
        actor.connect("head", proxy.endpoint)
        actor.send("head", word(0))
        assert next_of(head) == ("generator-0.0", word(0))
        proxy.cut(silently=True)
        wait_until(lambda: proxy.n_connections == 1, "it connects again")
        actor.send("head", word(1))
        assert next_of(head) == ("generator-0.0", word(1))
        head.send("generator-0.0", word(2))
        assert next_of(actor) == ("head", word(2))
        actor.close(0)
        proxy.close()
