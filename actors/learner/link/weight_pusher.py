"""The push thread of a learner: sends snapshots (never the live parameters) during the next update."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from actors.runtime.context import journal_pushed
from areal_bus.core.events import Event
from areal_bus.errors import PushFailed
from areal_bus.messages import Message, PushBegin, PushBroken, PushDone
from areal_bus.storage.journal import Journal
from areal_bus.weights.delta import ChangeHistory
from areal_bus.weights.snapshot import Snapshot

KEPT = 2  # snapshots: the newest and the previous one, which a push may still need


def is_on_gpu(snapshot: Snapshot) -> bool:
    """Whether it is in GPU memory that other processes can open."""
    return snapshot.shared is not None and snapshot.shared.device.type == "cuda"


class WeightPusher:
    """Executes pushes in order. `push` sends one snapshot and blocks until it ends."""

    def __init__(
        self,
        push: Callable[[Snapshot, PushBegin], PushDone],
        *,
        send: Callable[[Message], None],
        failed: Callable[[BaseException], None],
        changes: ChangeHistory | None = None,
    ) -> None:
        """`push` raises PushFailed; `failed` receives other exceptions; `changes` follows the snapshots, for deltas."""
        self._push = push
        self._send = send
        self._failed = failed
        self._changes = changes
        self._begun: queue.SimpleQueue[PushBegin | None] = queue.SimpleQueue()
        self._kept: dict[int, Snapshot] = {}
        self._sending: Snapshot | None = None
        self._put_by: list[Snapshot] = []  # replaced while being sent; not reused until the push ends
        self._asked: set[int] = set()  # requested pushes that have not ended
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[PushDone | PushBroken] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pusher", daemon=True)
        self._thread.start()

    def keep(self, snapshot: Snapshot) -> None:
        """Keep the snapshot of the newest version and drop the oldest."""
        with self._lock:
            previous = self._kept[max(self._kept)] if self._kept else None
            if self._changes is not None and previous is not None:
                self._changes.follow(previous, snapshot)
            self._kept[snapshot.version] = snapshot
            for version in sorted(self._kept)[:-KEPT]:
                del self._kept[version]

    def spare(self) -> Snapshot | None:
        """The oldest kept snapshot, forgotten here: its memory is free. None: too few are kept, or it is being sent."""
        if self._changes is not None:
            self._changes.settle()  # it may still be compared
        with self._lock:
            if len(self._kept) < KEPT:
                return None
            free = [*self._put_by, self._kept.pop(min(self._kept))]
            found = next((snapshot for snapshot in free if snapshot is not self._sending), None)
            self._put_by = [one for one in free if one is not found and is_on_gpu(one)]
            return found

    def begin(self, begin: PushBegin) -> None:
        """Queue a push; callable from any thread."""
        with self._lock:
            self._asked.add(begin.push)
        self._begun.put(begin)

    def drop(self) -> list[int]:
        """Drop queued pushes of a head that is gone. Returns the pushes that have not ended."""
        with self._lock:
            with suppress(queue.Empty):
                while (begin := self._begun.get_nowait()) is not None:
                    self._asked.discard(begin.push)
            return sorted(self._asked)

    def record(self, journal: Journal) -> None:
        """Journal the pushes that ended since the last call. Runs on the thread that owns the journal."""
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return
            if isinstance(result, PushDone):
                journal_pushed(journal, result)
            else:
                journal.write(Event.PUSH_BROKEN, push=result.push, version=result.version, error=result.error)

    def close(self, timeout_s: float) -> None:
        """Stop the thread; a push in flight gets `timeout_s` to end."""
        self._begun.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (begin := self._begun.get()) is not None:
                result = self._one(begin)
                with self._lock:
                    self._asked.discard(begin.push)
                self._results.put(result)
                self._send(result)
        except BaseException as error:  # noqa: BLE001 (the loop raises it)
            self._failed(error)

    def _one(self, begin: PushBegin) -> PushDone | PushBroken:
        with self._lock:
            snapshot = self._sending = self._kept.get(begin.version)
            held = sorted(self._kept)
        if snapshot is None:
            return PushBroken(
                begin.push, begin.version, f"missing snapshot of version {begin.version}: learner 0 has {held}"
            )
        try:
            return self._push(snapshot, begin)
        except PushFailed as error:
            return PushBroken(begin.push, begin.version, str(error))
        finally:
            with self._lock:
                self._sending = None
