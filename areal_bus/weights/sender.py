"""The sending side of a push: learner rank 0 (the root) sends one snapshot to the members; each verifies every byte.

The phases of a push, by keys in the root's store (docs/weights.md):
  announce   the root sets the manifest and a handle of its memory; a member checks its model, allocates buffers and
             opens the memory
  ready      each member reports the group that it still holds; a member that fails reports the reason and ends the push
  go         if all members have opened the root's memory (`route.py`), each copies from it; otherwise the root names a
             process group (two gloo groups), and members without it build it
  buckets    copied, or broadcast in order; a member copies and verifies one while the next arrives
  report     each member reports completion to the root, by a key or by the group
`PushBegin` determines when a push begins and with which members.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin, PushDone
from areal_bus.weights.process_group import (
    WINDOW,
    PushGroup,
    PushGroups,
    PushWaits,
    StoreListener,
    brief,
    meet,
)
from areal_bus.weights.protocol import (
    HELD,
    CompletionReports,
    MemberReady,
    PushGo,
    SnapshotOffer,
    bucket,
    key,
    reason,
    title,
)
from areal_bus.weights.route import Route, is_shared
from areal_bus.weights.snapshot import Snapshot


class WeightSender:
    """The sending side. One push at a time, usually on a side thread while the main thread trains."""

    def __init__(self, store: TCPStore, *, interface: str, address: str, route: Route = "auto") -> None:
        self._store = store
        self._route = route
        self._listener = StoreListener(address, interface)
        self._groups = PushGroups()
        self._cancelled = threading.Event()
        self._current: int | None = None
        self._cancelled_pushes: deque[int] = deque(maxlen=16)  # cancelled before they began
        self._old_keys: list[str] = []  # of the previous push
        self._lock = threading.Lock()

    def push(self, snapshot: Snapshot, begin: PushBegin) -> PushDone:
        """Send the snapshot to `begin.members`. Blocks until all have reported, at most `begin.timeout_s`.

        A member that received wrong bytes reports to the head itself; the push of the others does not fail. Raises
        PushFailed, after an alarm to the members, when a member refuses, dies or misses the deadline.
        """
        if len(set(begin.members)) != len(begin.members) or begin.version != snapshot.version:
            raise PushFailed(
                f"a push sends the snapshot of its version once to each member: version {begin.version}, snapshot "
                f"{snapshot.version}, members {begin.members}"
            )
        with self._lock:
            self._cancelled.clear()
            self._current = begin.push
            snapshot.n_users += 1
            started = time.monotonic()
            try:
                if begin.push in self._cancelled_pushes:
                    raise PushFailed(f"push {begin.push} was cancelled before it began")
                self._forget_old_keys(begin)
                if begin.members:
                    self._push(snapshot, begin)
            except (PushFailed, RuntimeError) as error:
                self._groups.drop_view(begin.view)
                with suppress(RuntimeError):  # best effort: otherwise members stop at their own deadline
                    self._store.set(key(begin, "stop"), reason(error))
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{title(begin)} failed at the root: {brief(error)}") from error
            finally:
                snapshot.n_users -= 1
        return PushDone(begin.push, begin.version, snapshot.digest, time.monotonic() - started, 0.0)

    def cancel(self, push: int | None = None) -> None:
        """Cancel this push, even before it begins (None: the current one): its `push` raises PushFailed.

        Callable from any thread.
        """
        if push is not None:
            self._cancelled_pushes.append(push)
        if push in (None, self._current):
            self._cancelled.set()

    def close(self) -> None:
        """Retire all groups."""
        self._groups.clear()

    def _push(self, snapshot: Snapshot, begin: PushBegin) -> None:
        waits = PushWaits(
            title(begin),
            self._store,
            alarm=key(begin, "refused"),
            timeout_s=begin.timeout_s,
            cancelled=self._cancelled,
        )
        if self._route != "gloo" and snapshot.shared is not None and snapshot.place is not None:
            self._store.set(key(begin, "memory"), SnapshotOffer(snapshot.place, snapshot.shared.handle).encode())
        self._store.set(key(begin, "manifest"), snapshot.layout.encode())
        ready = self._ready(begin, waits)
        if is_shared(self._route, snapshot.place, {name: report.place for name, report in ready.items()}):
            self._store.set(key(begin, "go"), PushGo("").encode())
            with CompletionReports(self._store, begin, {name: report.pid for name, report in ready.items()}) as reports:
                waits.until(reports.are_there, reports.waits_for)
            return
        group = self._meet(begin, ready, waits)
        reported, statuses = group.report(HELD, waits.limit_s)
        self._send(snapshot, group, waits)
        waits.until(reported.is_completed, lambda: "the members' reports", group)
        if any(int(status) != HELD for status in statuses):
            self._groups.drop_view(begin.view)  # that member has dropped the group as well

    def _ready(self, begin: PushBegin, waits: PushWaits) -> dict[str, MemberReady]:
        """The reports of all members, once all are ready."""
        keys = {key(begin, f"ready/{name}"): name for name in begin.members}

        def missing() -> str:
            return "members to be ready: " + ", ".join(n for k, n in keys.items() if not self._store.check([k]))

        waits.until(lambda: self._store.check(list(keys)), missing)
        return {name: MemberReady.decode(self._store.get(at).decode()) for at, name in keys.items()}

    def _meet(self, begin: PushBegin, ready: Mapping[str, MemberReady], waits: PushWaits) -> PushGroup:
        """The group of this view: the previous one if all members still hold it, otherwise a new one."""
        group = self._groups.of_view(begin.view)
        size = len(begin.members) + 1
        if group is not None and {report.group for report in ready.values()} == {group.name} and group.size == size:
            self._store.set(key(begin, "go"), PushGo(group.name).encode())
            return group
        self._groups.drop_view(begin.view)
        name = f"view-{begin.view}.{self._store.add('groups', 1)}"
        self._store.set(key(begin, "go"), PushGo(name).encode())
        group = meet(name, self._store, waits, rank=0, size=size, listener=self._listener)
        self._groups.keep(begin.view, group)
        return group

    def _send(self, snapshot: Snapshot, group: PushGroup, waits: PushWaits) -> None:
        buckets, data = snapshot.layout.buckets(), snapshot.host_data()
        works: list[Any] = []
        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                waits.until(works[index - WINDOW].is_completed, bucket(index - WINDOW, len(buckets)), group)
            works.append(group.broadcast(data[start:stop], waits.limit_s))
        for index, work in enumerate(works[-WINDOW:], start=max(len(works) - WINDOW, 0)):
            waits.until(work.is_completed, bucket(index, len(buckets)), group)

    def _forget_old_keys(self, begin: PushBegin) -> None:
        """Delete the keys of the previous push. "stop" stays, for late members."""
        for old in self._old_keys:
            self._store.delete_key(old)
        names = ["memory", "manifest", "go", "refused"]
        names += [f"{phase}/{name}" for phase in ("ready", "report") for name in begin.members]
        self._old_keys = [key(begin, name) for name in names]
