"""What waits to go out: to each peer in order, until there is no more to go with it and its socket takes it.

What ZeroMQ does not take of the messages to a peer waits here, within bounds (I9): whoever keeps what it sends looks at
`n_bytes` before it sends more. What is beyond the bounds all the same, or for a peer that is gone, is void: it is
counted, and said and journalled when the count has doubled.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from loguru import logger

from areal_bus.transport.listener import Socket
from areal_bus.transport.rejections import NAMED, OTHERS
from areal_bus.wire.bundle import MAX_BYTES, MAX_MESSAGES, Frames, join

OUTBOX = 1 << 18  # messages that wait here for one peer
OUTBOX_BYTES = 256 << 20  # of those that wait for one peer, when a message comes that its owner sends again
ROOM_BYTES = 64 << 20  # who can wait sends a peer nothing more while so much waits for it

MORE, LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Messages to one peer that do not go out."""

    peer: str
    why: str  # of the last one
    n: int  # so far; said at 1, 2, 4, 8, ...


class SendQueues:
    """Of one Bus. `dealers` and `heard` are those of the moment: peers it connected to, and peers of its ROUTER.

    `letter`, `n_bytes` and `voids` may be called from any thread, the rest from the bus's own.
    """

    def __init__(self, name: str, router: Socket | None, dealers: dict[str, Socket], heard: dict[str, bytes]) -> None:
        self.undelivered: Counter[str] = Counter()  # void messages by peer
        self.waiting: dict[str, deque[Frames]] = {}  # no peer is here without a message
        self._name, self._router, self._dealers, self._heard = name, router, dealers, heard
        self._n_bytes: Counter[str] = Counter()  # by peer, from `letter` to the socket; no zeros
        self._n_here: Counter[str] = Counter()  # of those, what is in `waiting`; no zeros
        self._next: dict[str, tuple[Frames, int]] = {}  # by peer: the first of those as they go, and how many
        self._news: dict[str, Undelivered] = {}
        self._lock = threading.Lock()

    def letter(self, peer: str, frames: Frames, *, is_kept: bool = False) -> Callable[[], None]:
        """What posts this, for `flush`; it counts as waiting from now on. `is_kept`: its owner sends it again."""
        n_bytes = size(frames)
        with self._lock:
            self._n_bytes[peer] += n_bytes
        return lambda: self._post(peer, frames, n_bytes, is_kept=is_kept)

    def n_bytes(self, peer: str) -> int:
        """That wait for it."""
        return self._n_bytes.get(peer, 0)

    def voids(self) -> list[Undelivered]:
        """What there is to report since the last call: at most one a peer."""
        with self._lock:
            news, self._news = self._news, {}
        return list(news.values())

    def flush(self) -> None:
        """Give every peer's socket what it takes."""
        for peer in list(self.waiting):
            self._flush(peer)

    def let_go(self, peer: str) -> None:
        """Of what waits its socket is given what it takes, and nothing any more."""
        if peer in self.waiting:
            self._flush(peer)
        self._forget(peer)

    def _forget(self, peer: str) -> None:
        for frames in self.waiting.pop(peer, ()):
            self._gone(peer, size(frames))
        self._n_here.pop(peer, None)
        self._next.pop(peer, None)

    def _post(self, peer: str, frames: Frames, n_bytes: int, *, is_kept: bool) -> None:
        """Behind what waits; it goes with that at once where there is enough of it for a bundle."""
        waiting = self.waiting.setdefault(peer, deque())
        if len(waiting) >= OUTBOX:
            self._refuse(peer, n_bytes, f"it takes none, and {OUTBOX} wait for it")
        elif is_kept and self._n_here[peer] + n_bytes > OUTBOX_BYTES:
            self._refuse(peer, n_bytes, f"it takes none, and {OUTBOX_BYTES >> 20} MiB wait for it")
        else:
            waiting.append(frames)
            self._n_here[peer] += n_bytes
        if len(waiting) >= MAX_MESSAGES or self._n_here[peer] >= MAX_BYTES:
            self._flush(peer)

    def _refuse(self, peer: str, n_bytes: int, why: str) -> None:
        self._gone(peer, n_bytes)
        self._void(peer, 1, why, level="WARNING")

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
                self._gone(peer, n_bytes)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._heard.pop(peer, None)
        n_void = len(waiting)
        self._forget(peer)
        if n_void:
            self._void(peer, n_void, "it is not connected", level="DEBUG")  # its going is told by others

    def _send(self, peer: str, frames: Frames) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            give(dealer, frames)
        elif self._router is not None and peer in self._heard:
            give(self._router, [self._heard[peer], *frames])
        else:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def _gone(self, peer: str, n_bytes: int) -> None:
        """They wait no more, wherever they went."""
        with self._lock:
            self._n_bytes[peer] -= n_bytes
            if not self._n_bytes[peer]:
                del self._n_bytes[peer]

    def _void(self, peer: str, n_messages: int, why: str, *, level: str) -> None:
        if peer not in self.undelivered and len(self.undelivered) >= NAMED:
            peer = OTHERS
        before = self.undelivered[peer]
        self.undelivered[peer] = n = before + n_messages
        if n.bit_length() > before.bit_length():
            logger.log(level, "{}: messages to {} are void, {} so far: {}", self._name, peer, n, why)
            with self._lock:
                self._news[peer] = Undelivered(peer, why, n)


def give(socket: Socket, frames: Frames) -> None:
    """All of a message or nothing, which zmq.Again says. (send_multipart takes twice as long, for numbers as enums.)"""
    for frame in frames[:-1]:
        socket.send(frame, MORE)
    socket.send(frames[-1], LAST)


def size(frames: Frames) -> int:
    return sum(map(len, frames))
