"""Deltas: the numbers of the weights that changed since a version, as positions and new values in one payload.

A number is two bytes of a tensor, or one byte where the dtype has an odd size. Numbers are compared as bits, so a delta
is exact for every dtype. A tensor is cut into blocks. The payload is, all integers little-endian:
  table      for each block (n_changed, n_position_bytes), uint32
  positions  of each block: gaps, or a bitmap if that is not larger
  values     of each block: the changed numbers, in order
A gap is the count of unchanged numbers before a changed one. Each byte 255 adds 255 to it; the next lower byte ends it.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_bus.weights.manifest import TensorEntry, dtype_of
from areal_bus.weights.snapshot import Snapshot

BLOCK = 1 << 20  # numbers: its temporaries fit into a cache
MORE = 255  # byte of a gap that goes on
TABLE = np.dtype("<u4")

Bytes = NDArray[np.uint8]
Positions = NDArray[np.integer[Any]]


class Block(NamedTuple):
    """Numbers `start` to `stop` of one tensor, `size` bytes each."""

    entry: TensorEntry
    start: int
    stop: int
    size: int

    @property
    def n(self) -> int:
        return self.stop - self.start

    def of(self, bytes_N: Tensor) -> Tensor:
        """Bytes of this block, a view of the (N,) uint8 bytes of its tensor."""
        return bytes_N[self.start * self.size : self.stop * self.size]

    def numbers(self, flat: Bytes) -> NDArray[Any]:
        """This block of a whole flat buffer, as unsigned numbers."""
        at = self.entry.start
        return flat[at + self.start * self.size : at + self.stop * self.size].view(f"u{self.size}")


class Changed(NamedTuple):
    """The numbers of one block that changed."""

    n: int
    positions: Bytes  # encoded

    def decoded(self, block: Block) -> Positions:
        return decode_positions(self.positions, self.n, block.n)


Changes = tuple[Changed, ...]  # by block


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Weights that a member holds and does not change: a delta is applied to a copy of them."""

    version: int
    digest: str
    tensors: Mapping[str, Tensor]


class Patch(NamedTuple):
    """New numbers of one block."""

    block: Block
    positions: Positions
    values: NDArray[Any]


def blocks(entries: Sequence[TensorEntry]) -> list[Block]:
    """The blocks of all tensors, in order."""
    return [block for entry in entries for block in blocks_of(entry)]


def blocks_of(entry: TensorEntry) -> list[Block]:
    """Of one tensor; an empty one has none."""
    size = 1 if dtype_of(entry.dtype).itemsize % 2 else 2
    n = entry.n_bytes // size
    return [Block(entry, start, min(start + BLOCK, n), size) for start in range(0, n, BLOCK)]


def changes_between(old: Snapshot, new: Snapshot) -> Changes:
    """What changed, by block. Both snapshots have one layout and are in host memory."""
    before, after = old.data.numpy(), new.data.numpy()
    found = []
    for block in blocks(new.layout.entries):
        positions = np.flatnonzero(block.numbers(before) != block.numbers(after))
        found.append(Changed(len(positions), encode_positions(positions, block.n)))
    return tuple(found)


def union(links: Sequence[Changes], entries: Sequence[TensorEntry]) -> Changes:
    """What changed in any of these steps. Its new values are right for a member at the start of any of them."""
    if len(links) == 1:
        return links[0]
    found = []
    for index, block in enumerate(blocks(entries)):
        is_changed = np.zeros(block.n, dtype=bool)
        for link in links:
            is_changed[link[index].decoded(block)] = True
        positions = np.flatnonzero(is_changed)
        found.append(Changed(len(positions), encode_positions(positions, block.n)))
    return tuple(found)


def payload_bytes(changes: Changes, entries: Sequence[TensorEntry]) -> int:
    table = 2 * TABLE.itemsize * len(changes)
    parts = (len(one.positions) + one.n * block.size for block, one in zip(blocks(entries), changes, strict=True))
    return table + sum(parts)


def payload_of(changes: Changes, snapshot: Snapshot) -> Tensor:
    """(n,) uint8: the changes with the values of this snapshot, which is in host memory."""
    data, pairs = snapshot.data.numpy(), list(zip(blocks(snapshot.layout.entries), changes, strict=True))
    table = np.array([(one.n, len(one.positions)) for one in changes], dtype=TABLE)
    values = [block.numbers(data)[one.decoded(block)].view(np.uint8) for block, one in pairs if one.n]
    parts = [table.reshape(-1).view(np.uint8), *(one.positions for one in changes), *values]
    return torch.from_numpy(np.concatenate(parts))


def patches(payload: Tensor, entries: Sequence[TensorEntry]) -> Iterator[Patch]:
    """The new numbers of each block, in order. Raises ValueError for a payload that is not of this layout."""
    raw, found = payload.numpy(), blocks(entries)
    at = 2 * TABLE.itemsize * len(found)
    if len(raw) < at:
        raise ValueError(f"the table of {len(found)} blocks has {at} bytes: there are {len(raw)}")
    table = raw[:at].view(TABLE).reshape(-1, 2).astype(np.int64)
    sizes = np.array([block.size for block in found], dtype=np.int64)
    values_at = at + int(table[:, 1].sum())
    end = values_at + int((table[:, 0] * sizes).sum())
    if end != len(raw):
        raise ValueError(f"the table announces {end} bytes: there are {len(raw)}")
    for block, (n, n_position_bytes) in zip(found, table.tolist(), strict=True):
        positions = decode_positions(raw[at : at + n_position_bytes], n, block.n)
        stop = values_at + n * block.size
        values = raw[values_at:stop].copy().view(f"i{block.size}")  # a copy is aligned
        yield Patch(block, positions, values)
        at, values_at = at + n_position_bytes, stop


def encode_positions(positions: Positions, n_numbers: int) -> Bytes:
    """Ascending positions below `n_numbers` as gaps, or as a bitmap if that is not larger."""
    gaps = np.diff(positions, prepend=-1) - 1
    n_more = gaps // MORE
    n_bytes = len(gaps) + int(n_more.sum())
    if n_bytes >= _bitmap_bytes(n_numbers):
        is_changed = np.zeros(n_numbers, dtype=bool)
        is_changed[positions] = True
        return np.packbits(is_changed)
    if n_bytes == len(gaps):
        return gaps.astype(np.uint8)
    raw = np.full(n_bytes, MORE, dtype=np.uint8)
    raw[np.cumsum(n_more + 1) - 1] = gaps % MORE
    return raw


def decode_positions(raw: Bytes, n_changed: int, n_numbers: int) -> Positions:
    """The inverse. Raises ValueError unless there are `n_changed` positions below `n_numbers`."""
    if len(raw) == _bitmap_bytes(n_numbers):
        positions = np.flatnonzero(np.unpackbits(raw, count=n_numbers).view(bool))
    else:
        ends = np.flatnonzero(raw != MORE)
        positions = np.cumsum(raw, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(positions) != n_changed or (n_changed and int(positions[-1]) >= n_numbers):
        what = f"{len(positions)} positions are encoded for {n_changed} changes"
        raise ValueError(f"size mismatch: {what} in a block of {n_numbers}")
    return positions


def _bitmap_bytes(n_numbers: int) -> int:
    return -(-n_numbers // 8)


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
    """The changes of the last `depth` versions. Empty until `start`: members that copy need no delta.

    Each new snapshot is compared with the previous one on a thread of its own. The links form a chain: each begins with
    the digest at which the one before ends. A member names what it holds by its digest, so a number that is used again
    in a new term is no ambiguity.
    """

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
