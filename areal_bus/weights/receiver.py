"""The receiving side of a push (`sender.py`): writes and verifies every tensor in spare weights, in a side thread."""

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import torch
from loguru import logger
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import protocol
from areal_bus.weights.checksum import Checksum, prepare
from areal_bus.weights.delta import BaseWeights, Patch, blocks_of, patches
from areal_bus.weights.manifest import Manifest, TensorEntry, cut, first_difference
from areal_bus.weights.process_group import WINDOW, Operation, PushGroup, StoreListener, brief, join_store
from areal_bus.weights.shared_memory import MemoryPlace, Opened, open_memory, place_of
from areal_bus.weights.snapshot import forms_of
from areal_bus.weights.waits import PushWaits, StoreConnections, StoreWatch, Wakeup, reason_of

NUMBERS = {1: torch.int8, 2: torch.int16}  # by size in bytes


class Landing(Protocol):
    """Takes the buckets of a push."""

    @property
    def n_bytes(self) -> int:
        """Of all buckets."""

    @property
    def base(self) -> BaseWeights | None:
        """Weights that a delta is applied to; None: the buckets are the weights."""

    @property
    def wrong(self) -> list[str]:
        """Names of tensors with wrong checksums."""

    def write(self, start: int, bucket: Tensor) -> None:
        """Take the next bucket, (n,) uint8, of which `start` is the place. Call in order."""

    def finish(self) -> None:
        """All buckets were written."""


class ReceiveBuffers:
    """Target tensors of a push: buckets are copied into them; each tensor is verified when its last byte arrives."""

    def __init__(self, manifest: Manifest, into: Mapping[str, Tensor] | None, device: torch.device) -> None:
        self.wrong: list[str] = []  # names of tensors with wrong checksums
        self.n_bytes, self.base = manifest.n_bytes, None
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
        self._bytes = {name: _bytes(tensor) for name, tensor in self.tensors.items()}

    def write(self, start: int, bucket: Tensor) -> None:
        """Write the next bucket: (n,) uint8 of the flat buffer, in order. The checksum is of the copy."""
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

    def patch(self, base: Tensor, changed: Iterable[Patch]) -> None:
        """Write the next tensor: `base` (copied unless it is the target) with new numbers; `changed` are its blocks."""
        entry, source = self._entries[self._next], _bytes(base)
        target = self._bytes[entry.name]
        is_apart = source.data_ptr() != target.data_ptr()
        for block, positions, values in changed:
            piece = block.of(target)
            if is_apart and not len(positions):
                self._running.copy(block.of(source), piece)
                continue
            if is_apart:
                piece.copy_(block.of(source))
            places = torch.from_numpy(positions).to(target.device)
            piece.view(NUMBERS[block.size])[places] = torch.from_numpy(values).to(target.device)
            self._running.add(piece)
        self._complete(entry)

    def reject(self) -> None:
        """Nothing that was received can be used."""
        self.wrong = [entry.name for entry in self._entries]

    def _complete(self, entry: TensorEntry) -> None:
        if self._running.value() != self._checksums[self._next]:
            self.wrong.append(entry.name)
        self._next += 1
        self._running.restart()


class DeltaBuffers:
    """Collects the payload of a delta, and applies it to a copy of the weights that it starts from."""

    def __init__(self, n_bytes: int, base: BaseWeights, manifest: Manifest, buffers: ReceiveBuffers) -> None:
        self.n_bytes, self.base = n_bytes, base
        self._payload = torch.empty(n_bytes, dtype=torch.uint8)
        self._entries, self._buffers = manifest.entries, buffers

    @property
    def wrong(self) -> list[str]:
        return self._buffers.wrong

    def write(self, start: int, bucket: Tensor) -> None:
        self._payload[start : start + len(bucket)].copy_(bucket)

    def finish(self) -> None:
        """Every tensor of the target is verified, those without a change as well."""
        try:
            found = patches(self._payload, self._entries)
            for entry in self._entries:
                self._buffers.patch(self.base.tensors[entry.name], islice(found, len(blocks_of(entry))))
        except ValueError:  # wrong bytes concern this member only: it reports them as any others
            self._buffers.reject()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


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


class Received(NamedTuple):
    """Verified weights of one push."""

    tensors: dict[str, Tensor]
    digest: str
    receive_s: float
    sent_bytes: int  # that arrived from the sender; 0 if they were copied from shared memory
    delta_from: int | None  # version that the delta was applied to; None: all bytes


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
        self._trees = protocol.BroadcastTrees()
        self._rejected = ""  # digest of weights with which a delta did not give the right ones
        self._has_warned = False  # whether it was logged that the root's memory cannot be opened
        self._wake = Wakeup()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._endpoint = ""
        self._store: TCPStore | None = None
        self._connections: StoreConnections | None = None

    def receive(
        self,
        begin: PushBegin,
        into: Mapping[str, Tensor] | None = None,
        *,
        expect: Mapping[str, tuple[Sequence[int], str]] | None = None,
        base: BaseWeights | None = None,
    ) -> Received:
        """Take part in a push. Returns tensors whose every byte is verified.

        `into` are tensors to receive into (the engine's spare set), used if names, shapes, dtypes and device match;
        otherwise new memory is allocated. After a failure their contents are undefined. `base` are weights held here:
        the root may send a delta to them. They stay as they are, unless they are in the memory of `into`. `expect` (see
        `forms_of`) is the expected model. Raises PushFailed for another model, wrong bytes or a broken push.
        """
        if self.name not in begin.members:
            raise PushFailed(f"unknown member of the push: {self.name} is not among {begin.members}")
        with self._lock:
            self._cancelled.clear()
            started = time.monotonic()
            try:
                buffers, sent_bytes, start = self._receive(begin, into, expect, base)
            except (PushFailed, RuntimeError) as error:
                self._trees.drop_view(begin.view)
                self._refuse(begin, error)
                if isinstance(error, PushFailed):
                    raise
                raise PushFailed(f"{protocol.title(begin)} failed at {self.name}: {brief(error)}") from error
            if buffers.wrong:  # already reported: the root continues with the others
                self._trees.drop_view(begin.view)
                self._rejected = start.digest if start else ""
                by_delta = f", by a delta from version {start.version}" if start else ""
                which = f"{len(buffers.wrong)} of {len(buffers.tensors)} tensors of version {begin.version}"
                raise PushFailed(f"checksum mismatch in {which}, first {buffers.wrong[0]}{by_delta}")
            took_s = time.monotonic() - started
            return Received(buffers.tensors, buffers.digest, took_s, sent_bytes, start.version if start else None)

    def cancel(self) -> None:
        """Cancel the current push, if any: its `receive` raises PushFailed. Callable from any thread."""
        self._cancelled.set()
        self._wake.set()

    def close(self) -> None:
        """Retire all groups and disconnect from the store."""
        self._trees.clear()
        self._store, self._connections, self._endpoint = None, None, ""

    def _join(self, begin: PushBegin) -> tuple[TCPStore, StoreConnections]:
        """The store of this push. Another endpoint means another root: groups of the old one are retired."""
        if self._store is None or self._connections is None or self._endpoint != begin.store:
            self.close()
            self._store = join_store(begin.store, begin.timeout_s)
            self._connections = StoreConnections(self._store)
            self._endpoint = begin.store
        return self._store, self._connections

    def _receive(
        self,
        begin: PushBegin,
        into: Mapping[str, Tensor] | None,
        expect: Mapping[str, tuple[Sequence[int], str]] | None,
        base: BaseWeights | None,
    ) -> tuple[ReceiveBuffers, int, BaseWeights | None]:
        """Returns the written buffers, the bytes that the sender sent, and the weights that a delta was applied to."""
        store, connections = self._join(begin)
        watch = StoreWatch(connections, protocol.words(begin), self._wake, timeout_s=begin.timeout_s)
        name, limit_s = protocol.title(begin), begin.timeout_s
        waits = PushWaits(name, watch, timeout_s=limit_s, cancelled=self._cancelled, wake=self._wake)
        text = waits.value(protocol.key(begin, protocol.ANNOUNCE), lambda: "the root's announcement")
        announced = protocol.Announcement.decode(text)
        manifest = announced.manifest
        difference = None if expect is None else first_difference(expect, manifest)
        if difference is not None or manifest.version != begin.version:
            difference = difference or f"version {manifest.version} was announced for version {begin.version}"
            raise PushFailed(f"model mismatch in a push: {difference}")
        buffers = ReceiveBuffers(manifest, into, self._device)
        place, memory = self._open(announced.offer, manifest.n_bytes, waits)
        held = "" if base is None or base.digest == self._rejected else base.digest
        go, tree = self._meet(begin, store, place, held, waits)
        if tree is not None:
            landing = self._landing(go.delta, manifest, buffers, base)
            self._take(landing, manifest.bucket_bytes, tree, waits)
            return buffers, landing.n_bytes, landing.base
        if memory is not None:
            self._copy(manifest, buffers, memory, waits)
            if store.check([protocol.key(begin, protocol.END)]):  # an aborted push is not reported
                raise waits.aborted(reason_of(store.get(protocol.key(begin, protocol.END)).decode()))
            protocol.arrive(store, begin, protocol.REPORT, self.name)
            return buffers, 0, None
        raise PushFailed("only members that have opened the root's memory can copy from it")

    def _landing(
        self, delta: protocol.DeltaHeader | None, manifest: Manifest, buffers: ReceiveBuffers, base: BaseWeights | None
    ) -> Landing:
        if delta is None:
            return buffers
        if base is None or base.digest not in delta.bases:
            held = "none" if base is None else f"version {base.version}, {base.digest}"
            raise PushFailed(f"version mismatch of a delta: {self.name} holds {held}")
        return DeltaBuffers(delta.n_bytes, base, manifest, buffers)

    def _open(
        self, offer: protocol.SnapshotOffer | None, n_bytes: int, waits: PushWaits
    ) -> tuple[MemoryPlace, Opened | None]:
        """The place of this member and the root's memory; without access to it, None and a unique place."""
        here = place_of(self._device)
        if offer is None or offer.place != here:
            return here, None
        try:
            return here, open_memory(offer.handle, n_bytes, self._device)
        except PushFailed as error:  # hidden by a mount or a policy
            waits.check(lambda: "the root's memory")  # after an aborted push it may be gone
            if not self._has_warned:
                logger.warning("{}: cannot use shared memory, so weights come over gloo: {}", self.name, error)
            self._has_warned = True
            return MemoryPlace(f"{self.name} of {here.realm}", here.device, f"{here.host} ({error})"), None

    def _meet(
        self, begin: PushBegin, store: TCPStore, place: MemoryPlace, held: str, waits: PushWaits
    ) -> tuple[protocol.PushGo, protocol.BroadcastTree | None]:
        """Report ready, then use or build the groups that the root names; None when members copy."""
        tree = self._trees.of_view(begin.view)
        ready = protocol.MemberReady(self.name, tree.name if tree else "", place, os.getpid(), held)
        protocol.arrive(store, begin, protocol.READY, ready.encode())
        go = protocol.PushGo.decode(waits.value(protocol.key(begin, protocol.GO), lambda: "the root's go"))
        if go.copies:
            return go, None
        if tree is not None and tree.name == go.group:
            return go, tree
        self._trees.drop_view(begin.view)
        rank, size = begin.members.index(self.name) + 1, len(begin.members) + 1
        tree = protocol.meet_tree(go.group, store, waits, rank=rank, size=size, listener=self._listener)
        self._trees.keep(begin.view, tree)
        return go, tree

    def _copy(self, manifest: Manifest, buffers: ReceiveBuffers, memory: Opened, waits: PushWaits) -> None:
        """Copy from the root's memory. If the root overwrites it meanwhile, the checksums do not match."""
        buckets = manifest.buckets()
        for index, (start, stop) in enumerate(buckets):
            waits.check(protocol.bucket(index, len(buckets)))
            buffers.write(start, memory.data[start:stop])
            memory.release(start, stop)
        buffers.finish()

    def _take(self, landing: Landing, bucket_bytes: int, tree: protocol.BroadcastTree, waits: PushWaits) -> None:
        """Receive the buckets, relay them to this member's receivers, and report for all of them."""
        if (above := tree.above) is None:
            raise PushFailed(f"missing place of {self.name} below the root")
        reported = None if tree.below is None else tree.below.report(protocol.HELD, waits.limit_s)
        self._take_buckets(landing, cut(landing.n_bytes, bucket_bytes), tree, above, waits)
        worst = protocol.WRONG if landing.wrong else protocol.HELD
        if reported is not None:
            operation, statuses = reported
            waits.until(operation.done, lambda: "the reports of its receivers", tree)
            worst = max(worst, *map(int, statuses))
        sent, _ = above.report(worst, waits.limit_s)
        waits.until(sent.done, lambda: "its report to be taken", tree)

    def _take_buckets(
        self,
        landing: Landing,
        buckets: Sequence[tuple[int, int]],
        tree: protocol.BroadcastTree,
        above: PushGroup,
        waits: PushWaits,
    ) -> None:
        largest = max((stop - start for start, stop in buckets), default=0)
        staging = above.staging(largest, pin=self._device.type == "cuda")
        posted: list[Operation] = []

        def land(index: int) -> None:
            start, stop = buckets[index]
            piece = staging[index % WINDOW][: stop - start]
            waits.until(posted[index].done, protocol.bucket(index, len(buckets)), tree)
            relayed = None if tree.below is None else tree.below.broadcast(piece, waits.limit_s)
            landing.write(start, piece)
            if relayed is not None:  # then the next bucket may be received here
                waits.until(relayed.done, protocol.bucket(index, len(buckets)), tree)

        for index, (start, stop) in enumerate(buckets):
            if index >= WINDOW:
                land(index - WINDOW)
            posted.append(above.broadcast(staging[index % WINDOW][: stop - start], waits.limit_s))
        for index in range(max(len(buckets) - WINDOW, 0), len(buckets)):
            land(index)
        landing.finish()

    def _refuse(self, begin: PushBegin, error: Exception) -> None:
        """Report the reason to the root, so that it does not wait for the deadline; not if the root aborted first."""
        if self._store is None:
            return
        try:
            if not self._store.check([protocol.key(begin, protocol.END)]):
                protocol.stop_push(self._store, protocol.ends_of(begin), f"{self.name}: {protocol.reason(error)}")
        except RuntimeError:  # the root and its store are gone; the next push joins again
            self.close()
