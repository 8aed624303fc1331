"""The sending side of a push: learner rank 0 (the root) sends one snapshot to the members; each verifies every byte.

The phases of a push, by keys in the root's store (docs/weights.md):
  announce   the root sets the manifest and a handle of its memory; a member checks its model, allocates buffers and
             opens the memory
  ready      each member reports the groups that it still holds; a member that fails reports the reason and ends the
             push; the last one wakes the root
  go         if all members have opened the root's memory (`route.py`), each copies from it; otherwise the root names a
             tree of process groups (`protocol.py`), and members without it build it. If each member holds one of
             the last versions, only what changed since is sent (`delta.py`)
  buckets    copied, or broadcast in order; a member copies and verifies one while the next arrives
  report     each member reports completion to the root, in the store or through the groups
  end        the root sets it, also when the push has failed
`PushBegin` determines when a push begins and with which members.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin, PushDone
from areal_bus.weights import protocol
from areal_bus.weights.delta import ChangeHistory, Delta
from areal_bus.weights.manifest import cut
from areal_bus.weights.process_group import WINDOW, Operation, PushGroup, StoreListener, brief
from areal_bus.weights.route import Route, is_shared
from areal_bus.weights.snapshot import Snapshot
from areal_bus.weights.waits import PushWaits, StoreConnections, StoreWatch, Wakeup


@dataclass(frozen=True, slots=True)
class Sent:
    """What the root sent to each of its receivers."""

    n_bytes: int
    delta_from: int | None  # oldest version that the delta may start from; None: all bytes


NOTHING = Sent(0, None)  # no members, or they copied


class WeightSender:
    """The sending side. One push at a time, usually on a side thread while the main thread trains."""

    def __init__(
        self,
        store: TCPStore,
        *,
        interface: str,
        address: str,
        route: Route = "auto",
        changes: ChangeHistory | None = None,
    ) -> None:
        """Without `changes` every push is a full one."""
        self._store = store
        self._route = route
        self._changes = changes
        self._listener = StoreListener(address, interface)
        self._trees = protocol.BroadcastTrees()
        self._connections = StoreConnections(store)
        self._wake = Wakeup()
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
            given = f"version {begin.version}, snapshot {snapshot.version}, members {begin.members}"
            raise PushFailed(f"a push sends the snapshot of its version once to each member: {given}")
        with self._lock:
            self._cancelled.clear()
            self._current = begin.push
            snapshot.n_users += 1
            started, sent = time.monotonic(), NOTHING
            try:
                if begin.push in self._cancelled_pushes:
                    raise PushFailed(f"push {begin.push} was cancelled before it began")
                self._forget_old_keys(begin)
                if begin.members:
                    sent = self._push(snapshot, begin)
                    self._store.set(protocol.key(begin, protocol.END), "")
            except (PushFailed, RuntimeError) as error:
                self._trees.drop_view(begin.view)
                self._old_keys = [at for at in self._old_keys if at not in protocol.words(begin)]
                with suppress(RuntimeError):  # best effort: otherwise members stop at their own deadline
                    protocol.stop_push(self._store, protocol.words(begin), protocol.reason(error))
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{protocol.title(begin)} failed at the root: {brief(error)}") from error
            finally:
                snapshot.n_users -= 1
        took_s = time.monotonic() - started
        return PushDone(begin.push, begin.version, snapshot.digest, took_s, 0.0, sent.n_bytes, sent.delta_from)

    def cancel(self, push: int | None = None) -> None:
        """Cancel this push, even before it begins (None: the current one): it raises PushFailed. From any thread."""
        if push is not None:
            self._cancelled_pushes.append(push)
        if push in (None, self._current):
            self._cancelled.set()
            self._wake.set()

    def close(self) -> None:
        """Retire all groups."""
        self._trees.clear()

    def _push(self, snapshot: Snapshot, begin: PushBegin) -> Sent:
        ends = protocol.ends_of(begin)
        watch = StoreWatch(self._connections, ends, self._wake, timeout_s=begin.timeout_s)
        name, limit_s = protocol.title(begin), begin.timeout_s
        waits = PushWaits(name, watch, timeout_s=limit_s, cancelled=self._cancelled, wake=self._wake)
        try:
            self._store.set(protocol.key(begin, protocol.ANNOUNCE), self._announcement(snapshot).encode())
            ready = self._ready(begin, waits)
            if is_shared(self._route, snapshot.place, {name: report.place for name, report in ready.items()}):
                self._let_copy(begin, ready, watch, waits)
                return NOTHING
            return self._broadcast(snapshot, begin, ready, waits)
        finally:
            with suppress(RuntimeError):
                for end in ends:  # so that the watch ends
                    self._store.set(end, protocol.ALL)

    def _announcement(self, snapshot: Snapshot) -> protocol.Announcement:
        if self._route == "gloo" or snapshot.shared is None or snapshot.place is None:
            return protocol.Announcement(snapshot.layout, None)
        return protocol.Announcement(snapshot.layout, protocol.SnapshotOffer(snapshot.place, snapshot.shared.handle))

    def _ready(self, begin: PushBegin, waits: PushWaits) -> dict[str, protocol.MemberReady]:
        """The reports of all members, once all are ready."""

        def not_ready() -> str:
            late = protocol.missing(protocol.ready_reports(self._store, begin), begin)
            return f"members to be ready: {', '.join(late)}"

        waits.value(protocol.all_of(begin, protocol.READY), not_ready)
        ready = protocol.ready_reports(self._store, begin)
        if ready.keys() != set(begin.members):
            raise PushFailed(f"each member reports once that it is ready: {sorted(ready)} did, not {begin.members}")
        return ready

    def _let_copy(
        self, begin: PushBegin, ready: Mapping[str, protocol.MemberReady], watch: StoreWatch, waits: PushWaits
    ) -> None:
        self._store.set(protocol.key(begin, protocol.GO), protocol.PushGo("").encode())
        pids = {name: report.pid for name, report in ready.items()}
        with protocol.CompletionReports(self._store, watch, begin, pids) as reports:
            waits.until(reports.are_there, reports.waits_for, also=reports.running)

    def _broadcast(
        self, snapshot: Snapshot, begin: PushBegin, ready: Mapping[str, protocol.MemberReady], waits: PushWaits
    ) -> Sent:
        delta = self._delta(snapshot, ready)
        header = None if delta is None else protocol.DeltaHeader(len(delta.payload), delta.bases)
        tree = self._meet(begin, ready, waits, header)
        if (group := tree.below) is None:
            what = f"{protocol.title(begin)} has {len(begin.members)} members"
            raise PushFailed(f"the root of a tree has receivers: {what}")
        reported, statuses = group.report(protocol.HELD, waits.limit_s)
        data = snapshot.host_data() if delta is None else delta.payload
        self._send(data, snapshot.layout.bucket_bytes, group, waits)
        waits.until(reported.done, lambda: "the members' reports", group)
        if any(int(status) != protocol.HELD for status in statuses):
            self._trees.drop_view(begin.view)  # that member has dropped its groups as well
        return Sent(len(data), None if delta is None else delta.version)

    def _delta(self, snapshot: Snapshot, ready: Mapping[str, protocol.MemberReady]) -> Delta | None:
        """A delta for all members; None for a full push."""
        if self._changes is None:
            return None
        self._changes.start()
        return self._changes.delta(snapshot, {report.held for report in ready.values()})

    def _meet(
        self,
        begin: PushBegin,
        ready: Mapping[str, protocol.MemberReady],
        waits: PushWaits,
        delta: protocol.DeltaHeader | None,
    ) -> protocol.BroadcastTree:
        """The groups of this view: the previous ones if all members still hold them, otherwise new ones."""
        tree = self._trees.of_view(begin.view)
        size = len(begin.members) + 1
        if tree is not None and {report.group for report in ready.values()} == {tree.name} and tree.size == size:
            self._store.set(protocol.key(begin, protocol.GO), protocol.PushGo(tree.name, delta).encode())
            return tree
        self._trees.drop_view(begin.view)
        name = f"view-{begin.view}.{self._store.add('groups', 1)}"
        self._store.set(protocol.key(begin, protocol.GO), protocol.PushGo(name, delta).encode())
        tree = protocol.meet_tree(name, self._store, waits, rank=0, size=size, listener=self._listener)
        self._trees.keep(begin.view, tree)
        return tree

    def _send(self, data: Tensor, bucket_bytes: int, group: PushGroup, waits: PushWaits) -> None:
        buckets = cut(len(data), bucket_bytes)
        sent: list[Operation] = []
        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                waits.until(sent[index - WINDOW].done, protocol.bucket(index - WINDOW, len(buckets)), group)
            sent.append(group.broadcast(data[start:stop], waits.limit_s))
        for index, operation in enumerate(sent[-WINDOW:], start=max(len(sent) - WINDOW, 0)):
            waits.until(operation.done, protocol.bucket(index, len(buckets)), group)

    def _forget_old_keys(self, begin: PushBegin) -> None:
        """Delete the keys of the previous push. The words of a failed push stay, for late members."""
        for old in self._old_keys:
            self._store.delete_key(old)
        self._old_keys = [*protocol.keys_of_members(begin), *protocol.words(begin)]
