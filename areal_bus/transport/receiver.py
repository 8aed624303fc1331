"""What comes in, one ZeroMQ message at a time: read without letting a peer take more than its share, and refused unless
all of it are messages of this job that its authenticated sender may send here. Knows neither threads nor queues.

Who is struck off, sends too many frames or claims another's name has the rest of its message skipped unread.
"""

import re
from collections.abc import Callable

import zmq

from areal_bus.errors import WireError
from areal_bus.messages import Message, Role
from areal_bus.transport.curve import Keyring, seat_of
from areal_bus.transport.listener import MAX_CONNECTIONS, Listener, Socket, property_of
from areal_bus.transport.rejections import Rejections
from areal_bus.wire import bundle
from areal_bus.wire import codec as wire

IDENTITY = re.compile(rb"([A-Za-z0-9._-]{1,64})/([0-9a-f]{16})")  # of a connection: its actor's name, a random number
PROBE = [b""]  # what a Bus overlooks: sent to see whether a connection is still there
NAMELESS = "nobody"  # neither name nor address
SKIPPED = 100  # frames at most that are skipped in one go

NOBLOCK = int(zmq.NOBLOCK)

Received = tuple[str, Message, int]  # sender, message, bytes of its own
Authorise = Callable[[str, Message], None]


class Receiver:
    """Of all sockets of one Bus; `door` is that of its ROUTER."""

    def __init__(
        self, job: str, keys: Keyring | None, door: Listener | None, refusals: Rejections, *, authorise: Authorise
    ) -> None:
        """`authorise` raises WireError for a message that its sender, named by the connection, may not send here."""
        self.heard: dict[str, bytes] = {}  # peers of the ROUTER that have said something: name -> connection
        self.gone: list[str] = []  # peers of it whose connection has ended, until the bus takes them
        self._job, self._keys, self._door, self._refusals = job, keys, door, refusals
        self._authorise = authorise
        self._torn: set[Socket] = set()  # with the rest of a message to skip

    def from_server(self, dealer: Socket, name: str) -> list[Received]:
        """What comes next of the one this DEALER is connected to; empty when it was refused. Raises zmq.Again."""
        if self._is_skipping(dealer):
            return []
        frames = self._frames(dealer)
        if frames == PROBE:
            return []
        connection = name.encode()
        if self._refusals.is_struck_off(connection):
            self._refusals.drop(name)
            return []
        return self._decode(name, connection, frames)

    def from_client(self, router: Socket) -> list[Received]:
        """What came in next at the ROUTER; empty when it was refused. Raises zmq.Again."""
        if self._is_skipping(router):
            return []
        first = router.recv(NOBLOCK, copy=False)
        connection = first.bytes
        is_again = self._door is not None and self._door.said_something(first, connection)
        named = IDENTITY.fullmatch(connection)
        name = named[1].decode() if named else str(property_of(first, "Peer-Address") or NAMELESS)
        if self._refusals.is_struck_off(connection):
            self._refusals.drop(name)
            self._torn.add(router)
            return []
        if not self._recognise(router, name if named else "", first, known_as=name):
            self._torn.add(router)
            return []
        if is_again and name in self.heard:
            self.gone.append(name)
        received = self._decode(name, connection, self._frames(router))
        if received:
            self.heard[name] = connection
            self._mind_the_names(router)
        return received

    def end(self, connections: set[bytes]) -> None:
        """These have ended, and everything that came in by them is read."""
        ended = [name for name, connection in self.heard.items() if connection in connections] if connections else []
        for name in ended:
            del self.heard[name]
            self.gone.append(name)

    def _mind_the_names(self, router: Socket) -> None:
        """There are no more names than connections."""
        if len(self.heard) > MAX_CONNECTIONS:
            for name in [name for name, connection in self.heard.items() if not is_there(router, connection)]:
                del self.heard[name]

    def forget(self, socket: Socket) -> None:
        """It is closed."""
        self._torn.discard(socket)

    def _recognise(self, router: Socket, name: str, first: zmq.Frame, *, known_as: str) -> bool:
        """Whether that name is this connection's own."""
        connection = first.bytes
        held = self.heard.get(name, connection)
        if not name:
            reason, rule = "name", f"an identity is an actor's name and a random number; this is {connection[:40]!r}"
        elif name == Role.HEAD:  # what its own connections bring is never taken for the head's word
            reason, rule = "name", "nobody connects under the name of the head: it listens, and others connect to it"
        elif self._keys is not None and not self._keys.may_speak(property_of(first, "User-Id") or "", name):
            reason, rule = "key", f"a key speaks as the actors of its own rank; this one is not that of {name}"
        elif held != connection and is_there(router, held):
            reason, rule = "taken", f"a name has one connection at a time; {name} has another one"
        elif name not in self.heard and (other := self._same_guest(router, name)):
            reason, rule = "taken", f"a guest has one connection at a time; {name} would take the place of {other}"
        else:
            return True
        self._refusals.add(known_as, reason, rule, connection=connection)
        return False

    def _same_guest(self, router: Socket, name: str) -> str:
        """Another incarnation of this guest that is connected; "" when there is none, or it is no guest.

        Guests share a key: so none of them replaces another that is there. A rank's own key does that as it likes.
        """
        if self._keys is None or not self._keys.is_shared(name):
            return ""
        seat = seat_of(name)
        others = [other for other, held in self.heard.items() if seat_of(other) == seat and is_there(router, held)]
        return others[0] if others else ""

    def _decode(self, name: str, connection: bytes, frames: list[bytes]) -> list[Received]:
        """All that it says; nothing when any of it is refused."""
        try:
            if len(frames) > wire.MAX_FRAMES:
                raise WireError(f"a message has at most {wire.MAX_FRAMES} frames; this one has more", "frames")
            whole = [(part, wire.decode(part, job=self._job)) for part in bundle.split(frames)]
            for _, message in whole:
                self._authorise(name, message)
        except WireError as error:
            self._refusals.add(name, error.reason, str(error), connection=connection)
            return []
        return [(name, message, sum(map(len, part))) for part, message in whole]

    def _frames(self, socket: Socket) -> list[bytes]:
        """Of one message; of one that has more than any record those until there, and the rest is to be skipped."""
        part = socket.recv(NOBLOCK, copy=False)
        frames = [part.bytes]
        while part.more:
            if len(frames) > wire.MAX_FRAMES:
                self._torn.add(socket)
                break
            part = socket.recv(NOBLOCK, copy=False)
            frames.append(part.bytes)
        return frames

    def _is_skipping(self, socket: Socket) -> bool:
        """Skip some of what is left of a message, if there is any."""
        if socket not in self._torn:
            return False
        for _ in range(SKIPPED):
            if not socket.getsockopt(zmq.RCVMORE):
                self._torn.discard(socket)
                break
            socket.recv(zmq.NOBLOCK, copy=False)
        return True


def is_there(router: Socket, connection: bytes) -> bool:
    """Whether that peer can be sent to."""
    try:
        router.send_multipart([connection, *PROBE], zmq.NOBLOCK)
    except zmq.Again:
        return True
    except zmq.ZMQError:
        return False
    return True
