"""Receives and validates messages, and keeps them until the actor takes them.

A message is accepted whole or not at all: sender name, format, job and authorisation. The rest of a message is skipped
unread if its connection is banned, sends too many frames or claims the name of another connection.

Accepted messages wait in one queue for each sender, which are taken from in turn. The bus thread adds them in lists;
another thread takes them one by one. Bounded in bytes (I9): while the queue is full, the bus reads no socket, unless
one sender (a hog) has filled it: then it reads on and drops what the hog sends. The queue reports the time up to which
every sender was heard. A head that lags behind counts no silence after that time.
"""

import queue
import re
import time
from collections import Counter, deque
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
        """`authorise` raises WireError for a message that may not be sent. `is_hog`: one sender crowds out others."""
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
            form = "an actor's name and a random number"
            reason, rule = "name", f"invalid identity: it must be {form}; got {connection[:40]!r}"
        elif name == Role.HEAD:  # a client must not pass for the head
            reason, rule = "name", "the head listens, and no client may use its name"
        elif self._keys is not None and not self._keys.authenticates(property_of(first, "User-Id") or "", name):
            only = "a key authenticates the actors of its own rank only"
            reason, rule = "key", f"{only}; this key does not authenticate {name}"
        elif held != connection and is_connected(router, held):
            reason, rule = "taken", f"name in use: {name} has another connection"
        elif name not in self.clients and (other := self._other_incarnation(router, name)):
            reason, rule = "taken", f"name in use: {name} would replace {other}, a connected guest"
        else:
            return True
        self._rejections.add(known_as, reason, rule, connection=connection)
        return False

    def _other_incarnation(self, router: Socket, name: str) -> str:
        """Another connected incarnation of this guest, or "". Guests share a key: none may replace a connected one."""
        if self._keys is None or not self._keys.is_shared(name):
            return ""
        identity = identity_of(name)
        alike = {other: held for other, held in self.clients.items() if identity_of(other) == identity}
        return next((other for other, held in alike.items() if is_connected(router, held)), "")

    def _decode(self, name: str, connection: bytes, frames: list[bytes]) -> list[Received]:
        """All messages of one ZeroMQ message; none when one of them is rejected."""
        try:
            if len(frames) > wire.MAX_FRAMES:
                raise WireError(f"too many frames: a message has at most {wire.MAX_FRAMES}", "frames")
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


MARK_S = 0.05  # minimum distance of two recorded times
MAX_SENDERS = 1 << 14  # whose bytes are counted, unless more have messages here


class ReceiveQueue:
    """Receive queue of one Bus. Each of its counters is written by one thread."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.n_received = 0  # bytes; written by the bus thread in `count`
        self.n_consumed = 0  # bytes; written by the taking thread in `take`
        self._lists: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._waiting: dict[str, deque[Received]] = {}  # by sender; no empty queues
        self._turns: deque[str | float] = deque()  # senders in `_waiting`, in turn; marks, which pass with the round
        self._received: dict[str, int] = {}  # bytes by sender; written by the bus thread
        self._consumed: dict[str, int] = {}  # bytes by sender; written by the taking thread
        self._n_put = self._n_fetched = 0  # messages
        self._marks: deque[tuple[int, float]] = deque()  # (messages put, time up to which they are complete)
        self._marked = self._until = time.monotonic()
        self._is_woken = False  # since the last `take` that found nothing

    @property
    def is_full(self) -> bool:
        return self.n_received - self.n_consumed > self.cap_bytes

    @property
    def has_hog(self) -> bool:
        """Whether one sender's messages fill it: others are read once more, its own are dropped. For the bus thread."""
        is_over = self.n_received - self.n_consumed > 2 * self.cap_bytes
        return self.is_full and not is_over and any(map(self.is_hog, self._received))

    def is_hog(self, sender: str) -> bool:
        """Whether it is full, and more than half of that is of this sender. Called by the bus thread."""
        waiting = self._received.get(sender, 0) - self._consumed.get(sender, 0)
        return self.is_full and 2 * waiting > self.cap_bytes

    def count(self, received: list[Received]) -> None:
        """Count messages that were read and will be put."""
        for sender, _, n_bytes in received:
            self.n_received += n_bytes
            self._received[sender] = self._received.get(sender, 0) + n_bytes
        if len(self._received) > MAX_SENDERS:
            for sender in [name for name, n in self._received.items() if n == self._consumed.get(name, 0)]:
                del self._received[sender]
                self._consumed.pop(sender, None)

    def put(self, messages: list[Received]) -> None:
        """Add messages in order, with one wake-up."""
        if messages:
            self._n_put += len(messages)
            self._lists.put(messages)

    def mark_complete(self, now: float) -> None:
        """Record that all messages that arrived before this time have been put. Called by the bus thread."""
        if now - self._marked >= MARK_S:
            self._marked = now
            self._marks.append((self._n_put, now))

    @property
    def until(self) -> float:
        """Of each sender all messages from before this time were taken, or one since. Read by the taking thread."""
        self._fetch()
        while self._turns and isinstance(self._turns[0], float):
            self._until = self._turns.popleft()  # type: ignore[assignment]
        return self._until

    def wake(self) -> None:
        """Make a waiting `take` return None. Callable from any thread."""
        self._lists.put(None)

    def take(self, timeout_s: float | None, *, skips: Callable[[str], bool] | None = None) -> Received | None:
        """Next message of the next sender in turn; None after `timeout_s` or when woken. `skips`: senders that wait."""
        self._fetch()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (received := self._next(skips)) is None and not self._is_woken:
            rest_s = None if deadline is None else deadline - time.monotonic()
            if timeout_s == 0 or (rest_s is not None and rest_s <= 0):
                return None
            try:
                self._add(self._lists.get(timeout=rest_s))
            except queue.Empty:
                return None
            self._fetch()
        if received is None:
            self._is_woken = False
        return received

    def consume(self, received: Received) -> bool:
        """Count a taken message. Returns whether the queue was full before and is not full now."""
        sender, _, n_bytes = received
        before = self.n_consumed
        self.n_consumed += n_bytes
        self._consumed[sender] = self._consumed.get(sender, 0) + n_bytes
        n_received = self.n_received  # read once and last, because the bus thread counts concurrently
        return n_received - before > self.cap_bytes >= n_received - self.n_consumed

    def _fetch(self) -> None:
        """Move what was put to the queues of the senders, and place the marks behind it."""
        while not self._lists.empty():
            self._add(self._lists.get())
        while self._marks and self._marks[0][0] <= self._n_fetched:
            self._turns.append(self._marks.popleft()[1])

    def _add(self, messages: list[Received] | None) -> None:
        if messages is None:
            self._is_woken = True
            return
        self._n_fetched += len(messages)
        for received in messages:
            waiting = self._waiting.get(received[0])
            if waiting is None:
                self._waiting[received[0]] = waiting = deque()
                self._turns.append(received[0])
            waiting.append(received)

    def _next(self, skips: Callable[[str], bool] | None) -> Received | None:
        for _ in range(len(self._turns)):
            turn = self._turns.popleft()
            if isinstance(turn, float):
                self._until = turn
            elif skips is not None and skips(turn):
                self._turns.append(turn)
            else:
                waiting = self._waiting[turn]
                received = waiting.popleft()
                if waiting:
                    self._turns.append(turn)
                else:
                    del self._waiting[turn]
                return received
        return None
