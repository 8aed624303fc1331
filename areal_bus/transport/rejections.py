"""What came and was not taken: counted by peer and reason, named once, and whom to hear no more; knows no sockets.

Every count is bounded, whatever comes: peers beyond `NAMED` are counted together, and of connections only the newest
`WATCHED` are remembered.
"""

import threading
from collections import Counter
from dataclasses import dataclass

from loguru import logger

STRIKES = 10  # refusals after which a connection's messages are dropped undecoded
NAMED = 1000  # peers that have a count and a line of their own
WATCHED = 8192  # connections with strikes that are remembered
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Rejection:
    """What one peer sent was refused for one reason."""

    peer: str
    reason: str  # one word: docs/wire.md has the list
    sentence: str  # the rule and the values, of the last one
    n: int  # times so far; said at 1, 2, 4, 8, ...


class Rejections:
    """Counts of one process. Written by the bus thread, read by any."""

    def __init__(self, name: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by peer and reason
        self._name = name  # who refuses
        self._peers: set[str] = set()
        self._strikes: dict[bytes, int] = {}  # by connection, the longest known first
        self._news: dict[tuple[str, str], Rejection] = {}
        self._lock = threading.Lock()

    def add(self, peer: str, reason: str, sentence: str, *, connection: bytes | None = None) -> None:
        """Count one; the first of a peer is told to people. With `connection` it is a strike against that one."""
        peer = self._counted_as(peer, sentence)
        self._count(peer, reason, sentence)
        if connection is None:
            return
        strikes = self._strikes.pop(connection, 0) + 1
        self._strikes[connection] = strikes
        if len(self._strikes) > WATCHED:
            del self._strikes[next(iter(self._strikes))]
        if strikes == STRIKES:
            logger.warning("{}: {!r} is struck off after {} refusals: heard no more", self._name, peer, STRIKES)

    def is_struck_off(self, connection: bytes) -> bool:
        return self._strikes.get(connection, 0) >= STRIKES

    def drop(self, peer: str) -> None:
        """Count a message of one that is struck off: nobody looks at it."""
        self._count(peer if peer in self._peers else OTHERS, "struck_off", f"struck off after {STRIKES} refusals")

    def take(self) -> list[Rejection]:
        """What there is to report since the last call: at most one a peer and reason."""
        with self._lock:
            news, self._news = self._news, {}
        return list(news.values())

    def _counted_as(self, peer: str, sentence: str) -> str:
        if peer in self._peers:
            return peer
        if len(self._peers) >= NAMED:
            if OTHERS not in self._peers:
                self._peers.add(OTHERS)
                logger.warning("{}: refuses more than {} peers; further ones have no name", self._name, NAMED)
            return OTHERS
        self._peers.add(peer)
        logger.warning("{}: refused what {!r} sent: {}", self._name, peer, sentence)
        return peer

    def _count(self, peer: str, reason: str, sentence: str) -> None:
        with self._lock:
            self.counts[peer, reason] += 1
            n = self.counts[peer, reason]
            if n & (n - 1) == 0:  # a report's size stays far below that of what is reported
                self._news[peer, reason] = Rejection(peer, reason, sentence, n)
