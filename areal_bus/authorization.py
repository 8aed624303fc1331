"""Authorisation: which role may send which message to which role, within which limits. One table for all receivers.

CURVE keys authenticate a peer; this table authorises it. The bus checks each incoming message by the name of its
authenticated connection, never by a field of the message. The head's core checks its members again. `core/rules.py` and
`core/parts/sample_limits.py` have the limits that depend on the run: capacity, vocabulary, tokens. A result is accepted
only with the id of its lease (`LeaseIds`). Pure.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from areal_bus import messages as m
from areal_bus import trajectories
from areal_bus.errors import ImpossibleEvent, WireError
from areal_bus.messages import Refund, Role
from areal_bus.sample_fields import broken_rule, unpacked

NAME = re.compile(r"(generator|reward|learner)-(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")  # ROLE-INDEX.INCARNATION

MAX_NAMES = 1 << 14  # whose roles are remembered: more than a socket has peers

_HEAD, _GENERATOR, _REWARD, _LEARNER = frozenset({Role.HEAD}), *(frozenset({role}) for role in list(Role)[1:])
_ANY = _GENERATOR | _REWARD | _LEARNER
_PUSHED = _GENERATOR | _LEARNER  # members and root of weight pushes
_OF_LEARNERS = (m.BeginTerm, m.Checkpointed, m.BatchRequest, m.UpdateDone, m.Finished)

Senders = dict[Role, frozenset[Role]]  # receiver -> roles that may send a message there
_ROWS: tuple[tuple[tuple[type, ...], Senders], ...] = (
    # reports of members to the head
    ((m.Join, m.Ready, m.Heartbeat, m.Failure), {Role.HEAD: _ANY}),
    ((m.LeaveRequest, m.Sampled, m.SampleFailed), {Role.HEAD: _GENERATOR}),
    ((m.Scored, m.GroupScored), {Role.HEAD: _REWARD}),
    (_OF_LEARNERS, {Role.HEAD: _LEARNER}),
    ((m.PushDone,), {Role.HEAD: _PUSHED}),
    # both ways
    ((m.Partial,), {Role.HEAD: _GENERATOR, Role.GENERATOR: _HEAD}),
    ((m.PushBroken,), {Role.HEAD: _PUSHED, Role.LEARNER: _HEAD}),
    # from a generator to a reward
    ((m.Trajectory,), {Role.REWARD: _GENERATOR}),
    # commands and reports of the head
    ((m.HeadHeartbeat, m.Rejoin, m.PeerList, m.Stop), dict.fromkeys(_ANY, _HEAD)),
    ((m.Reassign, m.PushBegin), dict.fromkeys(_PUSHED, _HEAD)),
    ((m.Evict, m.Term, m.Prompt, m.Ack), {Role.GENERATOR: _HEAD}),
    ((m.Group,), {Role.REWARD: _HEAD}),
    ((m.Cancel,), {Role.GENERATOR: _HEAD, Role.REWARD: _HEAD}),
    ((m.ShardItem, m.ShardEnd, m.NoBatch), {Role.LEARNER: _HEAD}),
)
SENDERS: dict[type, Senders] = {kind: senders for kinds, senders in _ROWS for kind in kinds}

REFUNDS_OF_GENERATORS = frozenset({Refund.SAMPLING_ERROR, Refund.PROMPT_TOO_LONG, Refund.LOST_TIMELINE})
REFUNDS_RULE = f"a generator's reasons are {', '.join(sorted(REFUNDS_OF_GENERATORS))}"
NUMBERS_RULE = "numbers of a push are 0 or more"

Rule = tuple[Callable[[Any], bool], str]  # whether a message keeps it, and the rule in words

OF_A_SAMPLE: Rule = (
    lambda sample: sample.uid >= 0 and sample.sample >= 0 and sample.attempt >= 0,
    "uid, sample and attempt are 0 or more",
)
OF_TURNS: Rule = (
    lambda sample: bool(sample.segments) and sample.segments[0][0] >= 1 and any(n for _, n in sample.segments),
    "a sample begins with one or more tokens of its prompt and has one or more sampled tokens",
)

OF_TRAJECTORIES: Rule = (
    lambda sample: not trajectories.broken_rule(sample.segments, sample.trajectories),
    "each segment extends a trajectory of the episode; each trajectory begins with given tokens and has sampled ones",
)

OF_ROLES: Rule = (
    lambda sample: not trajectories.broken_roles(sample.trajectories, sample.roles),
    "each trajectory of an episode has the name of a role, or none has",
)

OF_SECONDS: Rule = (lambda sample: sample.seconds >= 0, "seconds are 0 or more")

OF_FIELDS: Rule = (
    lambda sample: not broken_rule(unpacked(sample.fields)[0]),
    "a sample has at most 16 fields; each has its own name, which begins with a letter and is no stream of the learner",
)

LIMITS: dict[type, tuple[Rule, ...]] = {  # message type -> rules for its values, whoever receives it
    m.Join: (
        (lambda join: join.role != Role.GENERATOR or not join.endpoint, "a generator does not listen: no endpoint"),
        (lambda join: join.pid >= 0 and join.again >= 0, "pid and again are 0 or more"),
    ),
    m.Ready: ((lambda ready: ready.capacity >= 0, "a capacity is 0 or more samples"),),
    m.Heartbeat: ((lambda x: x.progress >= 0 and (x.version or 0) >= 0, "progress and version are 0 or more"),),
    m.Sampled: (OF_A_SAMPLE, (lambda sampled: sampled.n_tokens >= 1, "a sample has one or more tokens")),
    m.SampleFailed: ((lambda failed: failed.reason in REFUNDS_OF_GENERATORS, REFUNDS_RULE),),
    m.Partial: (OF_A_SAMPLE, OF_TURNS),
    m.Scored: (OF_FIELDS, OF_TRAJECTORIES, OF_ROLES),
    m.Trajectory: (OF_A_SAMPLE, OF_TURNS, OF_TRAJECTORIES, OF_ROLES, OF_FIELDS, OF_SECONDS),
    m.PushDone: ((lambda x: min(x.push, x.version, x.receive_s, x.stall_s, x.sent_bytes) >= 0, NUMBERS_RULE),),
    m.PushBroken: ((lambda broken: min(broken.push, broken.version) >= 0, NUMBERS_RULE),),
}


@lru_cache(maxsize=MAX_NAMES)
def role_of(name: str) -> Role | None:
    """Role of the actor of that name ("head", "generator-3.1"); None if it is not the name of an actor."""
    if name == Role.HEAD:
        return Role.HEAD
    found = NAME.fullmatch(name)
    return Role(found[1]) if found else None


def index_of(name: str) -> int:
    """Index among its role of an actor of this name."""
    return int(name.rpartition(".")[0].rpartition("-")[2])


def may_send(sender: Role | None, receiver: Role | None, kind: type) -> bool:
    """Whether `sender` may send this message type to `receiver`. None, no role, is never allowed."""
    return sender is not None and receiver is not None and sender in SENDERS.get(kind, {}).get(receiver, ())


def authorise(receiver: Role | None, sender: str, message: m.Message) -> None:
    """Raises WireError unless `sender` may send it there; a trajectory only by the generator it names."""
    if not may_send(role_of(sender), receiver, type(message)):
        to = receiver or "an actor without a role"
        what = f"{sender} may not send {type(message).__name__} to {to}"
        raise WireError(f"{what}: docs/wire.md lists the senders", "role")
    if isinstance(message, m.Trajectory) and message.generator != sender:
        raise WireError(f"a generator sends its own samples; {sender} sends one of {message.generator[:40]!r}", "maker")
    if broken := broken_limit(message):
        raise WireError(f"{type(message).__name__} of {sender} exceeds a limit: {broken}", "limit")


def broken_limit(message: m.Message) -> str:
    """The rule of LIMITS that this message breaks; "" for none."""
    for keeps, rule in LIMITS.get(type(message), ()):
        if not keeps(message):
            return rule
    return ""


def check_sender(role: Role, message: m.Message) -> None:
    """Check in the core of the head. Raises ImpossibleEvent when this role may not send it to the head."""
    if not may_send(role, Role.HEAD, type(message)):
        raise ImpossibleEvent(f"a {role} may not send {type(message).__name__} to the head")
    if broken := broken_limit(message):
        raise ImpossibleEvent(f"{type(message).__name__} exceeds a limit: {broken}")


ID_BYTES = 8


class LeaseIds:
    """The lease ids of one job: unguessable, derived from a secret, the same for all incarnations of its head.

    An id goes to the lease's holder, with each sample to a reward, and back in the verdict; no other process has it.
    """

    def __init__(self, secret: bytes) -> None:
        """Without a secret all ids are "": for heads without a network, as in the simulator."""
        self._secret = secret

    def of(self, evaluation: str, uid: int, attempt: int) -> str:
        """The id of the lease of one group, in hexadecimal digits."""
        if not self._secret:
            return ""
        return blake2b(f"{uid}.{attempt}.{evaluation}".encode(), key=self._secret, digest_size=ID_BYTES).hexdigest()

    def check(self, message: m.Scored | m.Partial) -> None:
        """Raises ImpossibleEvent unless it shows the id of the lease that it is about."""
        evaluation = message.evaluation if isinstance(message, m.Scored) else ""
        if not compare_digest(message.lease.encode(), self.of(evaluation, message.uid, message.attempt).encode()):
            of = f"prompt {message.uid} at attempt {message.attempt}"
            raise ImpossibleEvent(f"wrong lease id in a result of {of}: only its generator and its rewards have the id")
