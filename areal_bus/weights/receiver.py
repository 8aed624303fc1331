"""The receiving side of a push: verifies every byte and places it in the generator's buffers.

Weights arrive in a side thread while the engine decodes with those it holds. Knows no engine, and not what the tensors
are for; how a push goes is told in `sender.py`.
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
    """Where buckets come down: copies them to their tensors and verifies each tensor as its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors whose bytes are not those of the manifest
        self.digest = manifest.digest
        self._entries = manifest.entries
        self._checksums = manifest.checksums
        self._next = 0  # first entry not yet complete
        self._running = Checksum(device)  # of what has come of it
        if into is not None and _fits(manifest, into, device):
            self.tensors = {entry.name: into[entry.name] for entry in manifest.entries}
        else:
            flat = torch.empty(manifest.n_bytes, dtype=torch.uint8, device=device)
            self.tensors = {entry.name: entry.view(flat) for entry in manifest.entries}
        self._bytes = {name: tensor.detach().reshape(-1).view(torch.uint8) for name, tensor in self.tensors.items()}

    def land(self, start: int, bucket: Tensor) -> None:
        """`bucket` is (n,) uint8: bytes `start` to `start + n` of the flat buffer. In order.

        What has come down is summed up, not what it came from, which another process may change meanwhile.
        """
        stop = start + bucket.numel()
        while self._next < len(self._entries):
            entry = self._entries[self._next]
            low, high = max(entry.start, start), min(entry.stop, stop)
            if low < high:
                target = self._bytes[entry.name][low - entry.start : high - entry.start]
                self._running.bring(bucket[low - start : high - start], target)
            if entry.stop > stop:
                return
            self._complete(entry)

    def finish(self) -> None:
        """Raises PushFailed when buckets ended before the last tensor did."""
        if not self._entries or self._entries[-1].stop == 0:
            self.land(0, torch.empty(0, dtype=torch.uint8))  # nothing but empty tensors: no bucket came
        if self._next != len(self._entries):
            raise PushFailed(f"buckets must bring every tensor: {self._entries[self._next].name} is incomplete")

    def _complete(self, entry: TensorEntry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


def _fits(manifest: Manifest, into: Mapping[str, Tensor], device: torch.device) -> bool:
    """Each tensor is there, in the right form and place, and can be written byte by byte."""
    forms = forms_of(into)
    return all(
        forms.get(entry.name) == (entry.shape, entry.dtype)
        and into[entry.name].device.type == device.type
        and into[entry.name].is_contiguous()
        and not into[entry.name].is_inference()
        for entry in manifest.entries
    )


class WeightReceiver:
    """One member of pushes. One push at a time."""

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
        if device == "cpu":
            prepare()
        self.name = name
        self._listener = StoreListener(address, interface)
        self._device = torch.device("cpu" if staging == "host" else device)
        self._groups = PushGroups()
        self._found_shut = False  # the root's memory, which was said
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
                raise PushFailed(f"{title(begin)} failed at {self.name}: {brief(error)}") from error
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
    ) -> ReceiveBuffers:
        watch = PushWaits(
            title(begin),
            store,
            alarm=key(begin, "stop"),
            timeout_s=begin.timeout_s,
            cancelled=self._cancelled,
        )
        manifest = Manifest.decode(read(store, begin, "manifest", watch))
        difference = None if expect is None else first_difference(expect, manifest)
        if difference is not None or manifest.version != begin.version:
            said = difference or f"version {manifest.version} was announced for version {begin.version}"
            raise PushFailed(f"a push must bring the model that its members hold: {said}")
        landing = ReceiveBuffers(manifest, into, self._device)
        place, memory = self._open(manifest, begin, store, watch)
        group = self._meet(begin, store, place, watch)
        if group is not None:
            self._take(manifest, landing, group, watch)
        elif memory is not None:
            self._copy(manifest, landing, memory, watch)
        else:
            raise PushFailed("a push is copied only by members that have opened the root's memory")
        if group is None:
            watch.look(lambda: "its report", at_once=True)  # a push that was given up is not reported
            report(store, begin, self.name)
            return landing
        sent, _ = group.report(WRONG if landing.wrong else HELD, watch.limit_s)
        watch.until(sent.is_completed, lambda: "the root to take the report", group)
        return landing

    def _open(
        self, manifest: Manifest, begin: PushBegin, store: TCPStore, watch: PushWaits
    ) -> tuple[MemoryPlace, Opened | None]:
        """Where this receives, and the root's memory if that is there and can be opened; else a place like no other."""
        here, at = place_of(self._device), key(begin, "memory")
        offer = SnapshotOffer.decode(store.get(at).decode()) if store.check([at]) else None
        if offer is None or offer.place != here:
            return here, None
        try:
            return here, open_memory(offer.handle, manifest.n_bytes, self._device)
        except PushFailed as error:  # a mount or a policy hides it
            watch.look(lambda: "the root's memory")  # of a push that was given up it may be gone
            if not self._found_shut:
                logger.warning("{}: weights must be sent to it: {}", self.name, error)
            self._found_shut = True
            return MemoryPlace(f"{self.name} of {here.realm}", here.device, f"{here.host} ({error})"), None

    def _meet(self, begin: PushBegin, store: TCPStore, place: MemoryPlace, watch: PushWaits) -> PushGroup | None:
        """Say ready, then use or build the group that the root names; None when members copy."""
        group = self._groups.of_view(begin.view)
        ready = MemberReady(group.name if group else "", place, os.getpid())
        store.set(key(begin, f"ready/{self.name}"), ready.encode())
        go = PushGo.decode(read(store, begin, "go", watch))
        if go.copies:
            return None
        if group is not None and group.name == go.group:
            return group
        self._groups.drop_view(begin.view)
        rank, size = begin.members.index(self.name) + 1, len(begin.members) + 1
        group = meet(go.group, store, watch, rank=rank, size=size, listener=self._listener)
        self._groups.keep(begin.view, group)
        return group

    def _copy(self, manifest: Manifest, landing: ReceiveBuffers, memory: Opened, watch: PushWaits) -> None:
        """Out of the root's memory; should that hold another version meanwhile, the copy has other checksums."""
        buckets = manifest.buckets()
        for index, (start, stop) in enumerate(buckets):
            watch.look(bucket(index, len(buckets)))
            landing.land(start, memory.data[start:stop])
            memory.let_go(start, stop)
        landing.finish()

    def _take(self, manifest: Manifest, landing: ReceiveBuffers, group: PushGroup, watch: PushWaits) -> None:
        buckets = manifest.buckets()
        largest = min(manifest.bucket_bytes, manifest.n_bytes)
        staging = group.staging(largest, pin=self._device.type == "cuda")
        posted: list[Any] = []

        def land(index: int) -> None:
            start, stop = buckets[index]
            watch.until(posted[index].is_completed, bucket(index, len(buckets)), group)
            landing.land(start, staging[index % WINDOW][: stop - start])

        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                land(index - WINDOW)
            posted.append(group.broadcast(staging[index % WINDOW][: stop - start], watch.limit_s))
        for index in range(max(len(buckets) - WINDOW, 0), len(buckets)):
            land(index)
        landing.finish()

    def _refuse(self, begin: PushBegin, error: Exception) -> None:
        """Tell the root why, so that it need not wait for the deadline; nothing when the root gave up first."""
        if self._store is None:
            return
        try:
            if not self._store.check([key(begin, "stop")]):
                self._store.set(key(begin, "refused"), f"{self.name}: {reason(error)}")
        except RuntimeError:  # the root is gone with its store: nobody to tell, and the next push joins anew
            self.close()
