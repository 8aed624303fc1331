"""The weight push: learner rank 0 (the root) sends one snapshot to the members of a view; each verifies every byte.

One push, by keys in the root's store and two gloo groups (docs/weights.md has the picture):
  announce   the root sets the manifest; a member checks it against its model and makes room
  ready      each member says so, with the group it still holds; one that cannot says why and ends the push
  go         the root names the group; whoever does not hold it builds it
  buckets    broadcast in order; a member copies and verifies one while the next arrives
  report     each member tells the root whether all checksums were right
Knows nothing of engines, heads or versions' order: when a push begins, and with whom, comes with `PushBegin`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.collective import WINDOW, Group, Groups, Watch, brief, join_store, meet, open_device, serve_store
from areal_bus.errors import PushFailed
from areal_bus.landing import Landing
from areal_bus.messages import PushBegin, PushDone
from areal_bus.snapshot import Manifest, Snapshot, digest_of, first_difference, forms_of, take_snapshot

__all__ = ["Member", "Root", "Snapshot", "digest_of", "forms_of", "join_store", "serve_store", "take_snapshot"]

HELD, WRONG = 1, 2  # a member's report


class Root:
    """The sending side. One push at a time, usually on a side thread while the main thread trains."""

    def __init__(self, store: TCPStore, *, interface: str, address: str) -> None:
        self._store = store
        self._device = open_device(address, interface)
        self._groups = Groups()
        self._cancelled = threading.Event()
        self._under_way: int | None = None
        self._called_off: deque[int] = deque(maxlen=16)  # pushes that are not to begin any more
        self._old_keys: list[str] = []  # of the push before
        self._lock = threading.Lock()

    def push(self, snapshot: Snapshot, begin: PushBegin) -> PushDone:
        """Send the snapshot to `begin.members`. Blocks until all have reported, `begin.timeout_s` at most.

        A member that received wrong bytes reports that to the head by itself and does not fail the others' push.
        Raises PushFailed, after telling the members, when one refuses, dies or misses the deadline.
        """
        if len(set(begin.members)) != len(begin.members) or begin.version != snapshot.version:
            raise PushFailed(
                f"a push sends the snapshot of its version once to each member: version {begin.version}, snapshot "
                f"{snapshot.version}, members {begin.members}"
            )
        with self._lock:
            self._cancelled.clear()
            self._under_way = begin.push
            snapshot.n_users += 1
            started = time.monotonic()
            try:
                if begin.push in self._called_off:
                    raise PushFailed(f"push {begin.push} was called off before it began")
                self._forget_old_keys(begin)
                if begin.members:
                    self._push(snapshot, begin)
            except (PushFailed, RuntimeError) as error:
                self._groups.drop_view(begin.view)
                with suppress(RuntimeError):  # best effort: whoever is not told ends at its own deadline
                    self._store.set(_key(begin, "stop"), _reason(error))
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{_title(begin)} failed at the root: {brief(error)}") from error
            finally:
                snapshot.n_users -= 1
        return PushDone(begin.push, begin.version, snapshot.digest, time.monotonic() - started, 0.0)

    def cancel(self, push: int | None = None) -> None:
        """End this push, begun or not (None: the one that is under way): its `push` raises PushFailed.

        Callable from any thread.
        """
        if push is not None:
            self._called_off.append(push)
        if push in (None, self._under_way):
            self._cancelled.set()

    def close(self) -> None:
        """Let go of all groups."""
        self._groups.clear()

    def _push(self, snapshot: Snapshot, begin: PushBegin) -> None:
        watch = Watch(
            _title(begin),
            self._store,
            alarm=_key(begin, "refused"),
            timeout_s=begin.timeout_s,
            cancelled=self._cancelled,
        )
        self._store.set(_key(begin, "manifest"), snapshot.layout.encode())
        group = self._assemble(begin, watch)
        reported, statuses = group.report(HELD, watch.left_s)
        self._send(snapshot, group, watch)
        watch.until(reported.is_completed, lambda: "the members' reports", group)
        if any(int(status) != HELD for status in statuses):
            self._groups.drop_view(begin.view)  # that member has let go of it, too

    def _assemble(self, begin: PushBegin, watch: Watch) -> Group:
        """The group of this view, once all members are ready: the one of last time if all still hold it."""
        keys = {_key(begin, f"ready/{name}"): name for name in begin.members}

        def missing() -> str:
            return "members to be ready: " + ", ".join(n for k, n in keys.items() if not self._store.check([k]))

        watch.until(lambda: self._store.check(list(keys)), missing)
        group = self._groups.of_view(begin.view)
        held = {self._store.get(key).decode() for key in keys}
        size = len(begin.members) + 1
        if group is not None and held == {group.name} and group.size == size:
            self._store.set(_key(begin, "go"), group.name)
            return group
        self._groups.drop_view(begin.view)
        name = f"view-{begin.view}.{self._store.add('groups', 1)}"
        self._store.set(_key(begin, "go"), name)
        group = meet(name, self._store, watch, rank=0, size=size, device=self._device)
        self._groups.keep(begin.view, group)
        return group

    def _send(self, snapshot: Snapshot, group: Group, watch: Watch) -> None:
        buckets = snapshot.layout.buckets()
        works: list[Any] = []
        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                watch.until(works[index - WINDOW].is_completed, _bucket(index - WINDOW, len(buckets)), group)
            works.append(group.broadcast(snapshot.data[start:stop], watch.left_s))
        for index, work in enumerate(works[-WINDOW:], start=max(len(works) - WINDOW, 0)):
            watch.until(work.is_completed, _bucket(index, len(buckets)), group)

    def _forget_old_keys(self, begin: PushBegin) -> None:
        """Keys of the push before; "stop" stays, for members that come to it late."""
        for key in self._old_keys:
            self._store.delete_key(key)
        names = ["manifest", "go", "refused", *(f"ready/{name}" for name in begin.members)]
        self._old_keys = [_key(begin, name) for name in names]


class Member:
    """The receiving side: weights arrive in a side thread while the engine decodes with those it holds."""

    def __init__(
        self,
        name: str,
        *,
        address: str,
        interface: str,
        device: str = "cpu",
        staging: Literal["auto", "host", "device"] = "auto",
    ) -> None:
        """`device` is where the engine computes; `staging` where tensors are received ("auto": there)."""
        self.name = name
        self._gloo = open_device(address, interface)
        self._device = torch.device("cpu" if staging == "host" else device)
        self._groups = Groups()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._endpoint = ""
        self._store: TCPStore | None = None

    def receive(
        self,
        begin: PushBegin,
        into: Mapping[str, Tensor] | None = None,
        *,
        expect: Mapping[str, tuple[Sequence[int], str]] | None = None,
    ) -> tuple[dict[str, Tensor], str, float]:
        """Take part in a push: tensors by name, all verified, their digest, and the seconds it took.

        `into` is memory to receive into (the engine's spare set), used when names, shapes, dtypes and device fit and
        fresh memory otherwise; after a failure its contents are undefined. `expect` (see `forms_of`) is the model that
        must come. Raises PushFailed when it is another one, when bytes are wrong, or when the push breaks.
        """
        if self.name not in begin.members:
            raise PushFailed(f"a push is received by its members: {self.name} is none of {begin.members}")
        with self._lock:
            self._cancelled.clear()
            started = time.monotonic()
            try:
                landing = self._receive(begin, self._join(begin), into, expect)
            except (PushFailed, RuntimeError) as error:
                self._groups.drop_view(begin.view)
                self._refuse(begin, error)
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{_title(begin)} failed at {self.name}: {brief(error)}") from error
            if landing.wrong:  # reported: the root goes on with the others
                self._groups.drop_view(begin.view)
                raise PushFailed(
                    f"received bytes must have the checksums of the manifest: {len(landing.wrong)} of "
                    f"{len(landing.tensors)} tensors of version {begin.version} have not, first {landing.wrong[0]}"
                )
            return landing.tensors, landing.digest, time.monotonic() - started

    def cancel(self) -> None:
        """End the push that is under way, if any: its `receive` raises PushFailed. Callable from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Let go of all groups and of the store."""
        self._groups.clear()
        self._store, self._endpoint = None, ""

    def _join(self, begin: PushBegin) -> TCPStore:
        """The store of this push; another endpoint means another root, and groups of the old one are gone."""
        if self._store is None or self._endpoint != begin.store:
            self.close()
            self._store = join_store(begin.store, begin.timeout_s)
            self._endpoint = begin.store
        return self._store

    def _receive(
        self,
        begin: PushBegin,
        store: TCPStore,
        into: Mapping[str, Tensor] | None,
        expect: Mapping[str, tuple[Sequence[int], str]] | None,
    ) -> Landing:
        watch = Watch(
            _title(begin),
            store,
            alarm=_key(begin, "stop"),
            timeout_s=begin.timeout_s,
            cancelled=self._cancelled,
        )
        manifest = Manifest.decode(_read(store, begin, "manifest", watch))
        difference = None if expect is None else first_difference(expect, manifest)
        if difference is not None or manifest.version != begin.version:
            said = difference or f"version {manifest.version} was announced for version {begin.version}"
            raise PushFailed(f"a push must bring the model that its members hold: {said}")
        landing = Landing(manifest, into, self._device)
        group = self._meet(begin, store, watch)
        self._take(manifest, landing, group, watch)
        sent, _ = group.report(WRONG if landing.wrong else HELD, watch.left_s)
        watch.until(sent.is_completed, lambda: "the root to take the report", group)
        return landing

    def _meet(self, begin: PushBegin, store: TCPStore, watch: Watch) -> Group:
        """Say ready, then use or build the group that the root names."""
        group = self._groups.of_view(begin.view)
        store.set(_key(begin, f"ready/{self.name}"), group.name if group else "none")
        name = _read(store, begin, "go", watch)
        if group is not None and group.name == name:
            return group
        self._groups.drop_view(begin.view)
        rank, size = begin.members.index(self.name) + 1, len(begin.members) + 1
        group = meet(name, store, watch, rank=rank, size=size, device=self._gloo)
        self._groups.keep(begin.view, group)
        return group

    def _take(self, manifest: Manifest, landing: Landing, group: Group, watch: Watch) -> None:
        buckets = manifest.buckets()
        largest = min(manifest.bucket_bytes, manifest.n_bytes)
        staging = group.staging(largest, pin=self._device.type == "cuda")
        posted: list[Any] = []

        def land(index: int) -> None:
            start, stop = buckets[index]
            watch.until(posted[index].is_completed, _bucket(index, len(buckets)), group)
            landing.land(start, staging[index % WINDOW][: stop - start])

        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                land(index - WINDOW)
            posted.append(group.broadcast(staging[index % WINDOW][: stop - start], watch.left_s))
        for index in range(max(len(buckets) - WINDOW, 0), len(buckets)):
            land(index)
        landing.finish()

    def _refuse(self, begin: PushBegin, error: Exception) -> None:
        """Tell the root why, so that it need not wait for the deadline; nothing when the root gave up first."""
        if self._store is None:
            return
        try:
            if not self._store.check([_key(begin, "stop")]):
                self._store.set(_key(begin, "refused"), f"{self.name}: {_reason(error)}")
        except RuntimeError:  # the root is gone with its store: nobody to tell, and the next push joins anew
            self.close()


def _read(store: TCPStore, begin: PushBegin, name: str, watch: Watch) -> str:
    key = _key(begin, name)
    watch.until(lambda: store.check([key]), lambda: f"the root's {name}")
    return str(store.get(key).decode())


def _bucket(index: int, n: int) -> Callable[[], str]:
    return lambda: f"bucket {index + 1} of {n}"


def _key(begin: PushBegin, name: str) -> str:
    return f"push/{begin.push}/{name}"


def _title(begin: PushBegin) -> str:
    return f"push {begin.push} of version {begin.version}"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PushFailed) else brief(error)
