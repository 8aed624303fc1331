"""What changed between the last snapshots of the root, from which it makes deltas.

Each new snapshot is compared with the previous one on a thread of its own. The links form a chain: each begins with the
digest at which the one before ends. A member names what it holds by its digest, so a number that is used again in a new
term is no ambiguity.
"""

import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from areal_bus.weights.delta import Changes, changes_between, payload_bytes, payload_of, union
from areal_bus.weights.snapshot import Snapshot

MAX_SHARE = 0.5  # of the bytes of a full push: a larger delta does not pay


@dataclass(frozen=True, slots=True)
class Link:
    """The changes from one version to the next."""

    version: int
    digest: str
    changes: Changes


@dataclass(frozen=True, slots=True)
class Delta:
    """Changes that bring any of `bases` to the version of a snapshot."""

    payload: Tensor  # (n,) uint8
    version: int  # of the oldest base
    bases: tuple[str, ...]  # digests, the oldest first


class ChangeHistory:
    """The changes of the last `depth` versions. Empty until `start`: members that copy need no delta."""

    def __init__(self, depth: int) -> None:
        self._links: deque[Link] = deque(maxlen=depth)
        self._newest = ""  # digest at which the last link ends
        self._is_on = False
        self._comparison: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, "compares")
        self._lock = threading.Lock()
        self._last: tuple[str, Delta] | None = None  # digest of its snapshot; late members often need the same one

    def start(self) -> None:
        """Compare snapshots from now on."""
        self._is_on = True

    def follow(self, previous: Snapshot, snapshot: Snapshot) -> None:
        """Compare a new snapshot with the previous one, on the worker. Call `settle` before either is overwritten."""
        if self._is_on and previous.data.device.type == snapshot.data.device.type == "cpu":
            self.settle()
            self._comparison = self._worker.submit(self._compare, previous, snapshot)

    def settle(self) -> None:
        """Wait for the comparison in progress. Raises what it raised."""
        if (comparison := self._comparison) is not None:
            comparison.result()

    def delta(self, snapshot: Snapshot, held: Collection[str]) -> Delta | None:
        """A delta from all of these digests; None where a full push is needed or not larger by much."""
        if not self._is_on or snapshot.data.device.type != "cpu":
            return None
        self.settle()
        with self._lock:
            links, newest = list(self._links), self._newest
        digests = [*(link.digest for link in links), newest]
        if snapshot.digest not in digests:  # the first one of this process: members of an older one may hold it
            digests, links = [snapshot.digest], []
        target = max(i for i, digest in enumerate(digests) if digest == snapshot.digest)
        bases = digests[: target + 1]
        if not held or not set(held) <= set(bases):
            return None
        first = min(max(i for i, base in enumerate(bases) if base == digest) for digest in held)
        return self._made(snapshot, links[first:target], tuple(bases[first:]))

    def _compare(self, previous: Snapshot, snapshot: Snapshot) -> None:
        if previous.layout.entries != snapshot.layout.entries:
            raise ValueError("snapshots of one run have one layout")
        changes = changes_between(previous, snapshot)
        with self._lock:
            if self._newest != previous.digest or not _pays(changes, snapshot):
                self._links.clear()
            if _pays(changes, snapshot):
                self._links.append(Link(previous.version, previous.digest, changes))
            self._newest = snapshot.digest

    def _made(self, snapshot: Snapshot, links: list[Link], bases: tuple[str, ...]) -> Delta | None:
        if self._last is not None and (self._last[0], self._last[1].bases) == (snapshot.digest, bases):
            return self._last[1]
        entries = snapshot.layout.entries
        changes = union([link.changes for link in links], entries)
        if not _pays(changes, snapshot):
            return None
        version = links[0].version if links else snapshot.version
        delta = Delta(payload_of(changes, snapshot), version, bases)
        self._last = (snapshot.digest, delta)
        return delta


def _pays(changes: Changes, snapshot: Snapshot) -> bool:
    return payload_bytes(changes, snapshot.layout.entries) <= MAX_SHARE * snapshot.n_bytes
