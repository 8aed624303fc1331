"""Receives one ZeroMQ message from a socket and validates it: sender name, format, job and authorisation.

A message is accepted whole or not at all. The rest of a message is skipped unread if its connection is banned, sends
too many frames or claims the name of another connection.
"""

import re
from collections import Counter
from collections.abc import Callable, Set

import zmq

from areal_bus.errors import WireError
from areal_bus.messages import Message, Role
from areal_bus.transport.curve import Keyring, identity_of
from areal_bus.transport.listener import MAX_CONNECTIONS, READ_AHEAD, Listener, Socket, property_of
from areal_bus.transport.rejections import Rejections
from areal_bus.wire import bundle
from areal_bus.wire import codec as wire
from areal_bus.wire.header import object_bytes

IDENTITY = re.compile(rb"([A-Za-z0-9._-]{1,64})/([0-9a-f]{16})")  # of a connection: actor name, random number
PROBE = [b""]  # ignored by every Bus; sent to test whether a connection still exists
NAMELESS = "nobody"  # a peer without name and address
ROUND = 2 * READ_AHEAD  # reads of a connection that empty its queue; twice, because a turn may come early
SKIPPED = 100  # maximum frames that are skipped at once

NOBLOCK = int(zmq.NOBLOCK)

Received = tuple[str, Message, int]  # sender, message, bytes that it takes in memory
Authorise = Callable[[str, Message], None]


class Receiver:
    """Validates the messages of all sockets of one Bus. `listener` belongs to its ROUTER."""

    def __init__(
        self,
        job: str,
        keys: Keyring | None,
        listener: Listener | None,
        rejections: Rejections,
        *,
        authorise: Authorise,
        is_hog: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`authorise` raises WireError when the authenticated sender may not send the message to this actor.
        `is_hog`: whether so many bytes of this sender wait that others find no room.
        """
        self.clients: dict[str, bytes] = {}  # peers of the ROUTER, after their first message: name -> connection
        self.disconnected: list[str] = []  # peers whose connection has ended, until the bus reads them
        self._job, self._keys, self._listener, self._rejections = job, keys, listener, rejections
        self._authorise, self._is_hog = authorise, is_hog
        self._n_reads: Counter[bytes] = Counter()  # messages of the ROUTER in this round, by connection
        self._most_reads = 0  # of one connection
        self._unreachable: set[bytes] = set()  # connections of `clients` to which a send failed: they have ended
        self._skipping: set[Socket] = set()  # sockets with the rest of a message to skip

    def from_server(self, dealer: Socket, name: str) -> list[Received]:
        """Next messages of the peer of this DEALER; empty when rejected. Raises zmq.Again."""
        if self._is_skipping(dealer):
            return []
        frames = self._frames(dealer)
        if frames == PROBE:
            return []
        connection = name.encode()
        if self._rejections.is_banned(connection):
            self._rejections.drop(name)
            return []
        return self._decode(name, connection, frames)

    def from_client(self, router: Socket) -> list[Received]:
        """Next messages at the ROUTER; empty when rejected. Raises zmq.Again."""
        if self._is_skipping(router):
            return []
        first = router.recv(NOBLOCK, copy=False)
        connection = first.bytes
        self._n_reads[connection] += 1
        self._most_reads = max(self._most_reads, self._n_reads[connection])
        has_reconnected = self._listener is not None and self._listener.note_message(first, connection)
        named = IDENTITY.fullmatch(connection)
        name = named[1].decode() if named else str(property_of(first, "Peer-Address") or NAMELESS)
        if self._rejections.is_banned(connection):
            self._rejections.drop(name)
            self._skipping.add(router)
            return []
        if not self._recognise(router, name if named else "", first, known_as=name):
            self._skipping.add(router)
            return []
        if has_reconnected:
            self._unreachable.discard(connection)
            if name in self.clients:
                self.disconnected.append(name)
        if self._is_hog(name) and (self._keys is None or self._keys.is_shared(name)):
            rule = "a sender may fill half of a full inbox; further messages are dropped until there is room"
            self._rejections.add(name, "quota", rule)
            self._skipping.add(router)
            return []
        received = self._decode(name, connection, self._frames(router))
        if received:
            self.clients[name] = connection
            self._prune_names(router)
        return received

    @property
    def is_round_over(self) -> bool:
        """Whether all that had arrived when the round began has been read.

        ZeroMQ reads the connections of a ROUTER in turn. So when one was read ROUND times, each other one was read as
        often, or was empty.
        """
        return self._most_reads >= ROUND

    def begin_round(self) -> None:
        self._n_reads.clear()
        self._most_reads = 0

    def lose(self, name: str) -> None:
        """A send to this peer failed. It is reported as disconnected when its last messages have been read."""
        if name in self.clients:
            self._unreachable.add(self.clients[name])

    @property
    def has_unreachable(self) -> bool:
        """Whether `end_connections` has something to report."""
        return bool(self._unreachable)

    def end_connections(self, connections: Set[bytes]) -> None:
        """These connections, and the unreachable ones, have ended, and all their messages have been read."""
        connections, self._unreachable = connections | self._unreachable, set()
        if connections:
            self._end([name for name, connection in self.clients.items() if connection in connections])

    def _end(self, names: list[str]) -> None:
        """The one place that forgets a peer, so that none is forgotten without a report."""
        for name in names:
            del self.clients[name]
            self.disconnected.append(name)

    def _prune_names(self, router: Socket) -> None:
        """Remove names without a connection, so that names never outnumber connections."""
        if len(self.clients) > MAX_CONNECTIONS:
            self._end([name for name, connection in self.clients.items() if not is_connected(router, connection)])

    def forget(self, socket: Socket) -> None:
        """The socket is closed."""
        self._skipping.discard(socket)

    def _recognise(self, router: Socket, name: str, first: zmq.Frame, *, known_as: str) -> bool:
        """Whether this connection may use that name."""
        connection = first.bytes
        held = self.clients.get(name, connection)
        if not name:
            reason, rule = "name", f"an identity is an actor's name and a random number; got {connection[:40]!r}"
        elif name == Role.HEAD:  # a client must not pass for the head
            reason, rule = "name", "the head listens, and no client may use its name"
        elif self._keys is not None and not self._keys.authenticates(property_of(first, "User-Id") or "", name):
            reason, rule = (
                "key",
                f"a key authenticates the actors of its own rank only; this key does not authenticate {name}",
            )
        elif held != connection and is_connected(router, held):
            reason, rule = "taken", f"a name has one connection at a time; {name} has another one"
        elif name not in self.clients and (other := self._other_incarnation(router, name)):
            reason, rule = "taken", f"a guest has one connection at a time; {name} would replace {other}"
        else:
            return True
        self._rejections.add(known_as, reason, rule, connection=connection)
        return False

    def _other_incarnation(self, router: Socket, name: str) -> str:
        """Name of another connected incarnation of this guest; "" if there is none, or if it is not a guest.

        Guests share one key, so a guest may not replace a connected one. A rank with its own key may.
        """
        if self._keys is None or not self._keys.is_shared(name):
            return ""
        identity = identity_of(name)
        others = [
            other
            for other, held in self.clients.items()
            if identity_of(other) == identity and is_connected(router, held)
        ]
        return others[0] if others else ""

    def _decode(self, name: str, connection: bytes, frames: list[bytes]) -> list[Received]:
        """All messages of one ZeroMQ message; none when one of them is rejected."""
        try:
            if len(frames) > wire.MAX_FRAMES:
                raise WireError(f"a message has at most {wire.MAX_FRAMES} frames; this one has more", "frames")
            whole = [(part, wire.decode(part, job=self._job)) for part in bundle.split(frames)]
            for _, message in whole:
                self._authorise(name, message)
        except WireError as error:
            self._rejections.add(name, error.reason, str(error), connection=connection)
            return []
        return [(name, message, sum(map(len, part)) + object_bytes(part[0])) for part, message in whole]

    def _frames(self, socket: Socket) -> list[bytes]:
        """The frames of one message. Frames beyond the limit are left to be skipped."""
        part = socket.recv(NOBLOCK, copy=False)
        frames = [part.bytes]
        while part.more:
            if len(frames) > wire.MAX_FRAMES:
                self._skipping.add(socket)
                break
            part = socket.recv(NOBLOCK, copy=False)
            frames.append(part.bytes)
        return frames

    def _is_skipping(self, socket: Socket) -> bool:
        """Skip up to SKIPPED frames of a rejected message. Returns whether there was anything to skip."""
        if socket not in self._skipping:
            return False
        for _ in range(SKIPPED):
            if not socket.getsockopt(zmq.RCVMORE):
                self._skipping.discard(socket)
                break
            socket.recv(zmq.NOBLOCK, copy=False)
        return True


def is_connected(router: Socket, connection: bytes) -> bool:
    """Whether this connection of the ROUTER still exists."""
    try:
        router.send_multipart([connection, *PROBE], zmq.NOBLOCK)
    except zmq.Again:
        return True
    except zmq.ZMQError:
        return False
    return True
