"""What waits to go out: to each peer in order, for as long as its socket does not take it; knows no threads.

What ZeroMQ does not take of the messages to a peer waits here. A peer that is gone, or has `OUTBOX` messages waiting,
gets no more: those are void, counted and named once.
"""

from collections import Counter, deque

import zmq
from loguru import logger

from areal_bus.door import Socket
from areal_bus.refusals import NAMED, OTHERS

OUTBOX = 1 << 18  # messages that wait here for one peer

Frames = list[bytes]


class Outbox:
    """Of one Bus. `dealers` and `heard` are those of the moment: peers it connected to, and peers of its ROUTER."""

    def __init__(self, name: str, router: Socket | None, dealers: dict[str, Socket], heard: dict[str, bytes]) -> None:
        self.undelivered: Counter[str] = Counter()  # void messages by peer
        self.waiting: dict[str, deque[Frames]] = {}  # no peer is here without a message
        self._name, self._router, self._dealers, self._heard = name, router, dealers, heard

    def post(self, peer: str, frames: Frames) -> None:
        waiting = self.waiting.setdefault(peer, deque())
        if len(waiting) >= OUTBOX:
            self._void(peer, 1, f"it takes none, and {OUTBOX} wait for it")
            return
        waiting.append(frames)
        self._flush(peer)

    def flush(self) -> None:
        """Give every peer's socket what it takes."""
        for peer in list(self.waiting):
            self._flush(peer)

    def forget(self, peer: str) -> None:
        """Nothing of what waits goes to it."""
        self.waiting.pop(peer, None)

    def _flush(self, peer: str) -> None:
        waiting = self.waiting[peer]
        try:
            while waiting:
                self._send(peer, waiting[0])
                waiting.popleft()
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._heard.pop(peer, None)
            self._void(peer, len(waiting), "it is not connected")
        del self.waiting[peer]

    def _send(self, peer: str, frames: Frames) -> None:
        dealer = self._dealers.get(peer)
        if dealer is not None:
            dealer.send_multipart(frames, zmq.NOBLOCK)
        elif self._router is not None and peer in self._heard:
            self._router.send_multipart([self._heard[peer], *frames], zmq.NOBLOCK)
        else:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)

    def _void(self, peer: str, n_messages: int, why: str) -> None:
        if peer not in self.undelivered:
            if len(self.undelivered) >= NAMED:
                peer = OTHERS
            logger.debug("{}: {} messages to {} are void: {}", self._name, n_messages, peer, why)
        self.undelivered[peer] += n_messages
