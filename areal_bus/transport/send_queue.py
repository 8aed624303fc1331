"""Per-peer send queues: ordered, bounded in bytes, flushed in bundles when the socket is writable (I9).

A sender that can wait checks `n_bytes`. Messages over a limit, or to a disconnected peer, are dropped and counted.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq
from loguru import logger

from areal_bus.authorization import role_of
from areal_bus.messages import Role
from areal_bus.transport.listener import Socket
from areal_bus.transport.rejections import NAMED, OTHERS
from areal_bus.wire.bundle import MAX_BYTES, MAX_MESSAGES, Frames, join

MAX_QUEUED = 1 << 18  # maximum queued messages for one peer
MAX_RESENT_BYTES = 256 << 20  # maximum queued bytes for one peer when a resendable message is added
MAX_KEPT_BYTES = 512 << 20  # the same when another message is added, except for a learner, which gets whole batches
ROOM_BYTES = 64 << 20  # a sender that can wait pauses while this many bytes are queued for a peer

MORE, LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Messages to one peer that were dropped."""

    peer: str
    why: str  # of the last message
    n: int  # count so far; reported at 1, 2, 4, 8, ...


class SendQueues:
    """Send queues of one Bus. `dealers` and `clients` are its current peers: of DEALER sockets and of the ROUTER.

    `unreachable(peer)` is called when the ROUTER has no connection to a peer any more.

    `enqueue`, `n_bytes` and `take_undelivered` are thread-safe; the bus thread calls the others.
    """

    def __init__(
        self,
        name: str,
        router: Socket | None,
        dealers: dict[str, Socket],
        clients: Mapping[str, bytes],
        *,
        unreachable: Callable[[str], None] = lambda _: None,
        max_resent_bytes: int = MAX_RESENT_BYTES,
    ) -> None:
        self.max_queued, self.max_resent_bytes, self.max_kept_bytes = MAX_QUEUED, max_resent_bytes, MAX_KEPT_BYTES
        self.undelivered: Counter[str] = Counter()  # dropped messages by peer
        self.waiting: dict[str, deque[Frames]] = {}  # no empty queues
        self._name, self._router, self._dealers, self._clients = name, router, dealers, clients
        self._unreachable = unreachable
        self._n_bytes: Counter[str] = Counter()  # by peer, from `enqueue` to the socket; no zeros
        self._n_here: Counter[str] = Counter()  # the part of them in `waiting`; no zeros
        self._next: dict[str, tuple[Frames, int]] = {}  # by peer: next frames to send, and their number of messages
        self._pending: dict[str, Undelivered] = {}
        self._lock = threading.Lock()

    def enqueue(self, peer: str, frames: Frames, *, is_resent: bool = False) -> Callable[[], None]:
        """A call that queues this message. It counts at once. `is_resent`: the sender resends it if it is lost."""
        n_bytes = size(frames)
        with self._lock:
            self._n_bytes[peer] += n_bytes
        return lambda: self._post(peer, frames, n_bytes, is_resent=is_resent)

    def n_bytes(self, peer: str) -> int:
        return self._n_bytes.get(peer, 0)

    def take_undelivered(self) -> list[Undelivered]:
        """New drops since the last call: at most one entry for each peer."""
        with self._lock:
            pending, self._pending = self._pending, {}
        return list(pending.values())

    def flush(self) -> None:
        """Send to each peer as much as its socket accepts."""
        for peer in list(self.waiting):
            self._flush(peer)

    def drop_peer(self, peer: str) -> None:
        """Send what the socket accepts and drop the rest of this peer's queue."""
        if peer in self.waiting:
            self._flush(peer)
        self._forget(peer)

    def refuse(self, peer: str, why: str) -> None:
        """Count a message that cannot be encoded."""
        self._count_dropped(peer, 1, why, level="ERROR")

    def _forget(self, peer: str) -> None:
        for frames in self.waiting.pop(peer, ()):
            self._uncount(peer, size(frames))
        self._n_here.pop(peer, None)
        self._next.pop(peer, None)

    def _post(self, peer: str, frames: Frames, n_bytes: int, *, is_resent: bool) -> None:
        """Append to the queue; flush it when it fills a bundle."""
        waiting = self.waiting.setdefault(peer, deque())
        most = self.max_resent_bytes if is_resent else self.max_kept_bytes
        if len(waiting) >= self.max_queued:
            self._drop(peer, n_bytes, f"its socket is full and {self.max_queued} messages are queued")
        elif self._n_here[peer] + n_bytes > most and (is_resent or role_of(peer) is not Role.LEARNER):
            self._drop(peer, n_bytes, f"its socket is full and {most >> 20} MiB are queued")
        else:
            waiting.append(frames)
            self._n_here[peer] += n_bytes
        if len(waiting) >= MAX_MESSAGES or self._n_here[peer] >= MAX_BYTES:
            self._flush(peer)

    def _drop(self, peer: str, n_bytes: int, why: str) -> None:
        self._uncount(peer, n_bytes)
        self._count_dropped(peer, 1, why, level="WARNING")

    def _flush(self, peer: str) -> None:
        waiting = self.waiting[peer]
        try:
            while waiting:
                if peer not in self._next:
                    self._next[peer] = join(waiting)
                frames, n_messages = self._next[peer]
                self._send(peer, frames)
                del self._next[peer]
                n_bytes = sum(size(waiting.popleft()) for _ in range(n_messages))
                self._n_here[peer] -= n_bytes
                self._uncount(peer, n_bytes)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable(peer)
        n_dropped = len(waiting)
        self._forget(peer)
        if n_dropped:
            self._count_dropped(peer, n_dropped, "it is not connected", level="DEBUG")  # the disconnect is reported too

    def _send(self, peer: str, frames: Frames) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            send_frames(dealer, frames)
        elif self._router is not None and peer in self._clients:
            send_frames(self._router, [self._clients[peer], *frames])
        else:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def _uncount(self, peer: str, n_bytes: int) -> None:
        """These bytes are no longer queued."""
        with self._lock:
            self._n_bytes[peer] -= n_bytes
            if not self._n_bytes[peer]:
                del self._n_bytes[peer]

    def _count_dropped(self, peer: str, n_messages: int, why: str, *, level: str) -> None:
        if peer not in self.undelivered and len(self.undelivered) >= NAMED:
            peer = OTHERS
        before = self.undelivered[peer]
        self.undelivered[peer] = n = before + n_messages
        if n.bit_length() > before.bit_length():
            logger.log(level, "{}: messages to {} were dropped, {} so far: {}", self._name, peer, n, why)
            with self._lock:
                self._pending[peer] = Undelivered(peer, why, n)


def send_frames(socket: Socket, frames: Frames) -> None:
    """Send all frames or raise zmq.Again. (send_multipart takes twice as long, because it converts enums.)"""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], LAST)


def size(frames: Frames) -> int:
    return sum(map(len, frames))
