"""The receiving side of a push: verifies every byte and writes it into the generator's spare weights.

Weights arrive in a side thread while the engine decodes with the live ones. `sender.py` describes the phases.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from loguru import logger
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.checksum import Checksum, prepare
from areal_bus.weights.manifest import Manifest, TensorEntry, first_difference
from areal_bus.weights.process_group import (
    WINDOW,
    PushGroup,
    PushGroups,
    PushWaits,
    StoreListener,
    brief,
    join_store,
    meet,
)
from areal_bus.weights.protocol import (
    HELD,
    WRONG,
    MemberReady,
    PushGo,
    SnapshotOffer,
    bucket,
    key,
    read,
    reason,
    report,
    title,
)
from areal_bus.weights.shared_memory import MemoryPlace, Opened, open_memory, place_of
from areal_bus.weights.snapshot import forms_of


class ReceiveBuffers:
    """Target tensors of a push: buckets are copied into them; each tensor is verified when its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors with wrong checksums
        self.digest = manifest.digest
        self._entries = manifest.entries
        self._checksums = manifest.checksums
        self._next = 0  # index of the first incomplete entry
        self._running = Checksum(device)  # checksum of the received part of that entry
        if into is not None and _fits(manifest, into, device):
            self.tensors = {entry.name: into[entry.name] for entry in manifest.entries}
        else:
            flat = torch.empty(manifest.n_bytes, dtype=torch.uint8, device=device)
            self.tensors = {entry.name: entry.view(flat) for entry in manifest.entries}
        self._bytes = {name: tensor.detach().reshape(-1).view(torch.uint8) for name, tensor in self.tensors.items()}

    def write(self, start: int, bucket: Tensor) -> None:
        """Write the next bucket: (n,) uint8, bytes `start` to `start + n` of the flat buffer. Call in order.

        The checksum is of the copy: another process may change the source meanwhile.
        """
        stop = start + bucket.numel()
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low < high:
                target = self._bytes[entry.name][low - entry.start : high - entry.start]
                self._running.copy(bucket[low - start : high - start], target)
            if entry.stop > stop:
                return
            self._complete(entry)

    def finish(self) -> None:
        """Raises PushFailed when the buckets do not cover all tensors."""
        if not self._entries or self._entries[-1].stop == 0:
            self.write(0, torch.empty(0, dtype=torch.uint8))  # only empty tensors: there was no bucket
        if self._next != len(self._entries):
            raise PushFailed(f"buckets must cover every tensor: {self._entries[self._next].name} is incomplete")

    def _complete(self, entry: TensorEntry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


def _fits(manifest: Manifest, into: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether all tensors exist with the right form and device and can be written byte by byte."""
    forms = forms_of(into)
    return all(
        forms.get(entry.name) == (entry.shape, entry.dtype)
        and into[entry.name].device.type == device.type
        and into[entry.name].is_contiguous()
        and not into[entry.name].is_inference()
        for entry in manifest.entries
    )


class WeightReceiver:
    """A member of pushes. One push at a time."""

    def __init__(
        self,
        name: str,
        *,
        address: str,
        interface: str,
        device: str = "cpu",
        staging: Literal["auto", "host", "device"] = "auto",
    ) -> None:
        """`device` is the device of the engine; `staging` is where tensors are received ("auto": on `device`)."""
        if device == "cpu":
            prepare()
        self.name = name
        self._listener = StoreListener(address, interface)
        self._device = torch.device("cpu" if staging == "host" else device)
        self._groups = PushGroups()
        self._has_warned = False  # whether it was logged that the root's memory cannot be opened
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
        """Take part in a push. Returns verified tensors by name, their digest, and the duration in seconds.

        `into` are tensors to receive into (the engine's spare set), used if names, shapes, dtypes and device match;
        otherwise new memory is allocated. After a failure their contents are undefined. `expect` (see `forms_of`) is
        the expected model. Raises PushFailed for another model, wrong bytes or a broken push.
        """
        if self.name not in begin.members:
            raise PushFailed(f"a push is received by its members: {self.name} is none of {begin.members}")
        with self._lock:
            self._cancelled.clear()
            started = time.monotonic()
            try:
                buffers = self._receive(begin, self._join(begin), into, expect)
            except (PushFailed, RuntimeError) as error:
                self._groups.drop_view(begin.view)
                self._refuse(begin, error)
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{title(begin)} failed at {self.name}: {brief(error)}") from error
            if buffers.wrong:  # already reported: the root continues with the others
                self._groups.drop_view(begin.view)
                raise PushFailed(
                    f"received bytes must have the checksums of the manifest: {len(buffers.wrong)} of "
                    f"{len(buffers.tensors)} tensors of version {begin.version} have not, first {buffers.wrong[0]}"
                )
            return buffers.tensors, buffers.digest, time.monotonic() - started

    def cancel(self) -> None:
        """Cancel the current push, if any: its `receive` raises PushFailed. Callable from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Retire all groups and disconnect from the store."""
        self._groups.clear()
        self._store, self._endpoint = None, ""

    def _join(self, begin: PushBegin) -> TCPStore:
        """The store of this push. Another endpoint means another root: groups of the old one are retired."""
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
    ) -> ReceiveBuffers:
        waits = PushWaits(
            title(begin),
            store,
            alarm=key(begin, "stop"),
            timeout_s=begin.timeout_s,
            cancelled=self._cancelled,
        )
        manifest = Manifest.decode(read(store, begin, "manifest", waits))
        difference = None if expect is None else first_difference(expect, manifest)
        if difference is not None or manifest.version != begin.version:
            difference = difference or f"version {manifest.version} was announced for version {begin.version}"
            raise PushFailed(f"a push must send the model that its members hold: {difference}")
        buffers = ReceiveBuffers(manifest, into, self._device)
        place, memory = self._open(manifest, begin, store, waits)
        group = self._meet(begin, store, place, waits)
        if group is not None:
            self._take(manifest, buffers, group, waits)
        elif memory is not None:
            self._copy(manifest, buffers, memory, waits)
        else:
            raise PushFailed("only members that have opened the root's memory can copy from it")
        if group is None:
            waits.check(lambda: "its report", at_once=True)  # an aborted push is not reported
            report(store, begin, self.name)
            return buffers
        sent, _ = group.report(WRONG if buffers.wrong else HELD, waits.limit_s)
        waits.until(sent.is_completed, lambda: "the root to take the report", group)
        return buffers

    def _open(
        self, manifest: Manifest, begin: PushBegin, store: TCPStore, waits: PushWaits
    ) -> tuple[MemoryPlace, Opened | None]:
        """The place of this member and the root's memory; without access to it, None and a unique place."""
        here, at = place_of(self._device), key(begin, "memory")
        offer = SnapshotOffer.decode(store.get(at).decode()) if store.check([at]) else None
        if offer is None or offer.place != here:
            return here, None
        try:
            return here, open_memory(offer.handle, manifest.n_bytes, self._device)
        except PushFailed as error:  # hidden by a mount or a policy
            waits.check(lambda: "the root's memory")  # after an aborted push it may be gone
            if not self._has_warned:
                logger.warning("{}: shared memory cannot be used, weights are sent over gloo: {}", self.name, error)
            self._has_warned = True
            return MemoryPlace(f"{self.name} of {here.realm}", here.device, f"{here.host} ({error})"), None

    def _meet(self, begin: PushBegin, store: TCPStore, place: MemoryPlace, waits: PushWaits) -> PushGroup | None:
        """Report ready, then use or build the group that the root names; None when members copy."""
        group = self._groups.of_view(begin.view)
        ready = MemberReady(group.name if group else "", place, os.getpid())
        store.set(key(begin, f"ready/{self.name}"), ready.encode())
        go = PushGo.decode(read(store, begin, "go", waits))
        if go.copies:
            return None
        if group is not None and group.name == go.group:
            return group
        self._groups.drop_view(begin.view)
        rank, size = begin.members.index(self.name) + 1, len(begin.members) + 1
        group = meet(go.group, store, waits, rank=rank, size=size, listener=self._listener)
        self._groups.keep(begin.view, group)
        return group

    def _copy(self, manifest: Manifest, buffers: ReceiveBuffers, memory: Opened, waits: PushWaits) -> None:
        """Copy from the root's memory. If the root overwrites it meanwhile, the checksums do not match."""
        buckets = manifest.buckets()
        for index, (start, stop) in enumerate(buckets):
            waits.check(bucket(index, len(buckets)))
            buffers.write(start, memory.data[start:stop])
            memory.release(start, stop)
        buffers.finish()

    def _take(self, manifest: Manifest, buffers: ReceiveBuffers, group: PushGroup, waits: PushWaits) -> None:
        buckets = manifest.buckets()
        largest = min(manifest.bucket_bytes, manifest.n_bytes)
        staging = group.staging(largest, pin=self._device.type == "cuda")
        posted: list[Any] = []

        def land(index: int) -> None:
            start, stop = buckets[index]
            waits.until(posted[index].is_completed, bucket(index, len(buckets)), group)
            buffers.write(start, staging[index % WINDOW][: stop - start])

        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                land(index - WINDOW)
            posted.append(group.broadcast(staging[index % WINDOW][: stop - start], waits.limit_s))
        for index in range(max(len(buckets) - WINDOW, 0), len(buckets)):
            land(index)
        buffers.finish()

    def _refuse(self, begin: PushBegin, error: Exception) -> None:
        """Report the reason to the root, so that it does not wait for the deadline; not if the root aborted first."""
        if self._store is None:
            return
        try:
            if not self._store.check([key(begin, "stop")]):
                self._store.set(key(begin, "refused"), f"{self.name}: {reason(error)}")
        except RuntimeError:  # the root and its store are gone; the next push joins again
            self.close()
