"""Who may send what: every message type, from every role, to every receiver, over real sockets and real identities."""

import dataclasses
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loguru import logger

from areal_bus import messages as m
from areal_bus.authorization import (
    LIMITS,
    REFUNDS_OF_GENERATORS,
    SENDERS,
    authorise,
    broken_limit,
    check_sender,
    may_send,
    role_of,
)
from areal_bus.errors import ImpossibleEvent, WireError
from areal_bus.messages import Message, Role
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import Keyring, new_pair
from areal_bus.transport.rejections import STRIKES
from areal_bus.wire import codec, schema
from tests.support.polling import wait_until
from tests.support.strangers import JOB, OpenBus

COMMANDS = "HeadHeartbeat Rejoin PeerList Stop"
ALLOWED = {  # receiver -> sender -> what it may send there; written out once more, so that no row changes unseen
    "head": {
        "generator": "Join Ready Heartbeat Failure LeaveRequest Sampled SampleFailed Partial PushDone PushBroken",
        "reward": "Join Ready Heartbeat Failure Scored GroupScored",
        "learner": "Join Ready Heartbeat Failure BeginTerm Checkpointed BatchRequest UpdateDone Finished PushDone "
        "PushBroken",
    },
    "generator": {"head": f"{COMMANDS} Reassign Evict Term Prompt Partial Ack Cancel PushBegin"},
    "reward": {"head": f"{COMMANDS} Cancel Group", "generator": "Trajectory"},
    "learner": {"head": f"{COMMANDS} Reassign PushBegin PushBroken ShardItem ShardEnd NoBatch"},
}
NAMES = {"head": "head", "generator": "generator-0.0", "reward": "reward-0.0", "learner": "learner-0.0"}
SENDERS_OF = NAMES | {"guest": "generator-66.0", "another reward": "reward-1.0", "nobody": "x-0.0"}
PAIRS = {name: new_pair() for name in SENDERS_OF.values()}
SEATS = {"head-0": PAIRS["head"].public, "generator-*": PAIRS["generator-66.0"].public} | {
    name.rpartition(".")[0]: pair.public for name, pair in PAIRS.items() if name not in ("head", "generator-66.0")
}
KINDS = sorted(codec.KINDS.values(), key=lambda kind: kind.__name__)
ROUNDS = [KINDS[at : at + STRIKES - 1] for at in range(0, len(KINDS), STRIKES - 1)]  # nobody is struck off within one


def example(kind: type, sender: str) -> Message:
    """A good message of that kind, in the sender's own name."""
    hints = typing.get_type_hints(kind)
    plain: dict[object, object] = {int: 0, float: 0.0, str: sender, bool: False}
    plain |= {list[str]: [], list[int]: [], list[float]: []}
    values = {
        f.name: str(next(iter(schema.ENUMS[f"{kind.__name__}.{f.name}"])))
        if f"{kind.__name__}.{f.name}" in schema.ENUMS
        else plain.get(hints[f.name])
        for f in dataclasses.fields(kind)
    }
    tokens = {"segments": [[1, 1]], "spans": [[0, 1]], "ids": b"\0" * 8, "logps": b"\0" * 4}
    texts = {"prompt_text": "", "text": "", "row": "{}", "stats": {}, "turns": "", "fields": b"", "roles": ""}
    limits = {"n_tokens": 1, "reason": "sampling_error"}  # the first word of the list is the head's own reason
    values |= {name: value for name, value in (tokens | texts | limits).items() if name in values}
    return typing.cast(Message, kind(**values))


def opened(name: str, *, keys: bool, listens: Path | None = None, is_open: bool = False) -> Bus:
    listen = f"ipc://{listens}/{name}" if listens is not None else ""
    ring = Keyring(PAIRS[name], SEATS) if keys else None
    return (OpenBus if is_open else Bus)(name, job=JOB, listen=listen, keys=ring)


@contextmanager
def ends(folder: Path, sender: str, receiver: str, *, listener: str, keys: bool) -> Iterator[tuple[Bus, Bus]]:
    """The sender's bus, which takes anything, and the receiver's, as actors have it."""
    theirs = opened(sender, keys=keys, listens=folder if listener == "sender" else None, is_open=True)
    ours = opened(receiver, keys=keys, listens=folder if listener == "receiver" else None)
    try:
        if listener == "receiver":
            theirs.connect(receiver, ours.endpoint)
        else:
            ours.connect(sender, theirs.endpoint)
            ours.send(sender, example(codec.KINDS["Heartbeat"], receiver))  # so that it knows where we are
            assert theirs.receive(20)
        yield theirs, ours
    finally:
        theirs.close(0)
        ours.close(0)


def outcome(ours: Bus, n_refused: int) -> Message | None:
    """What came in, or None once a further refusal is counted."""
    deadline = time.monotonic() + 20
    while ours.refused.total() == n_refused:
        if (received := ours.receive(0.02)) is not None:
            return received[1]
        assert time.monotonic() < deadline, "it is neither taken nor refused"
    assert ours.receive(0) is None
    return None


WAYS = [
    *((sender, "head", "receiver") for sender in SENDERS_OF if sender != "head"),
    *((sender, "reward", "receiver") for sender in SENDERS_OF if sender != "reward"),
    *((sender, receiver, "sender") for receiver in ("generator", "reward", "learner") for sender in NAMES
      if sender != receiver),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(("sender", "receiver", "listener"), WAYS)
def test_a_message_is_accepted_only_from_the_roles_of_the_table(
    tmp_path: Path, sender: str, receiver: str, listener: str, keys: bool
) -> None:
    """The head's word comes by the receiver's own connection to it: at a listening socket nobody is the head."""
    by, to = SENDERS_OF[sender], NAMES[receiver]
    role = "generator" if sender == "guest" else "reward" if sender == "another reward" else sender
    allowed = "" if (listener, sender) == ("receiver", "head") else ALLOWED[receiver].get(role, "")
    taken: set[str] = set()
    for kinds in ROUNDS:
        told: list[str] = []
        sink = logger.add(told.append, level="WARNING", format="{message}")
        with ends(tmp_path, by, to, listener=listener, keys=keys) as (theirs, ours):
            n_refused = 0
            for kind in kinds:
                sent = example(kind, by)
                theirs.send(to, sent)
                got = outcome(ours, n_refused)
                assert got in (sent, None)
                taken |= {kind.__name__} if got is not None else set()
                n_refused += got is None
            reason = "name" if (listener, sender) == ("receiver", "head") else "role"
            assert ours.refused == ({(by, reason): n_refused} if n_refused else {})
        logger.remove(sink)
        assert sum(repr(by) in line for line in told) == min(n_refused, 1)
    assert taken == set(allowed.split())


def test_every_message_type_has_a_row_and_every_row_a_sender() -> None:
    assert set(SENDERS) == set(codec.KINDS.values())
    assert all(senders for rows in SENDERS.values() for senders in rows.values())


@pytest.mark.parametrize("role", [Role.GENERATOR, Role.REWARD, Role.LEARNER])
def test_the_heads_core_checks_the_same_table(role: Role) -> None:
    for kind in KINDS:
        if may_send(role, Role.HEAD, kind):
            check_sender(role, example(kind, "x"))
        else:
            with pytest.raises(ImpossibleEvent, match=f"a {role} may not send {kind.__name__} to the head"):
                check_sender(role, example(kind, "x"))


def test_a_role_is_that_of_an_actors_whole_name() -> None:
    assert [role_of(name) for name in NAMES.values()] == [Role.HEAD, Role.GENERATOR, Role.REWARD, Role.LEARNER]
    for name in ("", "generator", "generator-0", "generator-00.0", "generator-0.0x", "head.0", "Head", "x-0.0"):
        assert role_of(name) is None


def test_one_wrong_message_in_a_bundle_refuses_the_bundle(tmp_path: Path) -> None:
    with ends(tmp_path, "generator-0.0", "reward-0.0", listener="receiver", keys=True) as (theirs, ours):
        good = example(codec.KINDS["Trajectory"], "generator-0.0")
        stop = example(codec.KINDS["Stop"], "generator-0.0")
        theirs.send_all([("reward-0.0", message) for message in (good, stop, good)])
        wait_until(lambda: ours.refused["generator-0.0", "role"], "it is counted")
        assert ours.refused.total() == 1
        assert ours.receive(0) is None


def over(kind: type, **changes: object) -> Message:
    return dataclasses.replace(example(kind, "generator-66.0"), **changes)  # type: ignore[type-var]


NO_TURN = {"segments": [], "spans": [], "ids": b"", "logps": b""}
OVER_A_LIMIT = [
    over(m.Join, role="generator", endpoint="tcp://127.0.0.1:1"),
    over(m.Join, role="generator", endpoint="", again=-1),
    over(m.Ready, capacity=-1),
    over(m.Heartbeat, progress=-1),
    over(m.Heartbeat, version=-1),
    over(m.Sampled, n_tokens=0),
    over(m.Sampled, uid=-1),
    *(over(m.SampleFailed, reason=str(reason)) for reason in set(m.Refund) - REFUNDS_OF_GENERATORS),
    over(m.Partial, sample=-1),
    over(m.Partial, **NO_TURN),
    over(m.Trajectory, attempt=-1),
    over(m.Trajectory, seconds=-1.0),
    over(m.Trajectory, **NO_TURN),
    over(m.Trajectory, fields=b"returns\n" + bytes(4)),
    over(m.Trajectory, segments=[[0, 1]], ids=bytes(4)),
    over(m.Trajectory, segments=[[1, 0]], spans=[], ids=bytes(4), logps=b""),
    over(m.PushDone, receive_s=-1.0),
    over(m.PushBroken, push=-1),
]


@pytest.mark.parametrize("message", OVER_A_LIMIT, ids=lambda message: type(message).__name__)
def test_a_message_over_a_limit_is_refused_at_the_door_and_in_the_core(message: Message) -> None:
    (receiver,) = {role for role in SENDERS[type(message)] if may_send(Role.GENERATOR, role, type(message))}
    with pytest.raises(WireError, match="exceeds a limit"):
        authorise(receiver, "generator-66.0", message)
    if receiver is Role.HEAD:
        with pytest.raises(ImpossibleEvent, match="exceeds a limit"):
            check_sender(Role.GENERATOR, message)


def test_every_message_of_a_guest_has_its_limits_tried() -> None:
    sent = {kind for kind in SENDERS for to in SENDERS[kind] if may_send(Role.GENERATOR, to, kind)}
    of_a_guest = set(LIMITS) - {m.Scored}
    assert sent - {m.LeaveRequest, m.Failure} == of_a_guest == {type(message) for message in OVER_A_LIMIT}
    for kind in LIMITS:  # within its limits it passes
        assert not broken_limit(example(kind, "generator-66.0"))
