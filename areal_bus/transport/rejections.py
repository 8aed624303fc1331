"""Counts rejected input by peer and reason, logs peers once, bans repeated offenders. All tables are bounded."""

import threading
from collections import Counter
from dataclasses import dataclass

from loguru import logger

STRIKES = 10  # rejections after which messages of a connection are dropped undecoded
NAMED = 1000  # peers with their own count and log line
WATCHED = 8192  # connections whose strikes are remembered
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Input of one peer that was rejected for one reason."""

    peer: str
    reason: str  # one word: docs/wire.md has the list
    sentence: str  # rule and values of the last rejection
    n: int  # count so far; reported at 1, 2, 4, 8, ...


class Rejections:
    """Rejections of one process. Written by the bus thread, read by any thread."""

    def __init__(self, name: str) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by peer and reason
        self._name = name  # of this process
        self._peers: set[str] = set()
        self._strikes: dict[bytes, int] = {}  # by connection, oldest first
        self._pending: dict[tuple[str, str], Rejection] = {}
        self._lock = threading.Lock()

    def add(
        self, peer: str, reason: str, sentence: str, *, connection: bytes | None = None, n_unlogged: int = 0
    ) -> None:
        """Count a rejection, log the first of each peer (after `n_unlogged`). A `connection` gets a strike."""
        if self.counts[peer, reason] >= n_unlogged or peer in self._peers:
            peer = self._counted_as(peer, sentence)
        self._count(peer, reason, sentence)
        if connection is None:
            return
        strikes = self._strikes.pop(connection, 0) + 1
        self._strikes[connection] = strikes
        if len(self._strikes) > WATCHED:
            del self._strikes[next(iter(self._strikes))]
        if strikes == STRIKES:
            what = "{}: {!r} is banned after {} rejections; its further messages are dropped"
            logger.warning(what, self._name, peer, STRIKES)

    def is_banned(self, connection: bytes) -> bool:
        return self._strikes.get(connection, 0) >= STRIKES

    def drop(self, peer: str) -> None:
        """Count a dropped message of a banned connection."""
        self._count(peer if peer in self._peers else OTHERS, "struck_off", f"banned after {STRIKES} rejections")

    def take(self) -> list[Rejection]:
        """New counts since the last call: at most one for each peer and reason."""
        with self._lock:
            pending, self._pending = self._pending, {}
        return list(pending.values())

    def _counted_as(self, peer: str, sentence: str) -> str:
        if peer in self._peers:
            return peer
        if len(self._peers) >= NAMED:
            if OTHERS not in self._peers:
                self._peers.add(OTHERS)
                what = "{}: rejected input of more than {} peers; further ones are counted together"
                logger.warning(what, self._name, NAMED)
            return OTHERS
        self._peers.add(peer)
        logger.warning("{}: rejected input of {!r}: {}", self._name, peer, sentence)
        return peer

    def _count(self, peer: str, reason: str, sentence: str) -> None:
        with self._lock:
            self.counts[peer, reason] += 1
            n = self.counts[peer, reason]
            if n & (n - 1) == 0:  # report powers of two only
                self._pending[peer, reason] = Rejection(peer, reason, sentence, n)
