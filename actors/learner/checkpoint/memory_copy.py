"""A copy of a learner rank's state in memory that outlives its process: a memfd, held by the supervisor of the rank.

Two slots take turns. A slot is written in this order: its header is cleared; table and tensors are written; the header
is written, with version, number of the copy, lengths and checksums. A copy counts if all of these agree, so a process
that dies at any moment leaves the last whole copy. A copy is written, not mapped: it is no memory of this process.

`MemoryCopies` decides when to copy. The ranks begin from a version of which each of them has a copy.
"""

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from actors.learner.checkpoint import checkpoint
from actors.learner.model.frozen_model import REFERENCE
from actors.learner.update.ppo import PPOActor
from areal_bus.core.events import Event
from areal_bus.errors import CheckpointError
from areal_bus.storage.journal import Journal
from areal_bus.weights.checksum import Checksum

HEADER = struct.Struct(
    "<8sQQQQIII"
)  # magic, number, version, bytes of table and tensors, checksums of both and of this
MAGIC = b"areal-c1"
SLOT_BYTES = 1 << 44  # from one slot to the next; only written pages take memory
TABLE_AT = 4096  # in a slot
ALIGNED = 4  # bytes: each tensor begins at a multiple, as the checksum sums words
BUFFER_BYTES = 1 << 20  # stays in cache between the copy and the write
PINNED_BYTES = 32 << 20  # the same for a GPU, whose transfers are long


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a copy: this rank's piece of it."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    n_bytes: int  # of the piece
    at: int  # from the first tensor


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A whole copy of one version."""

    number: int  # 1, 2, 3, ... of the copies of a memory
    version: int
    about: dict[str, Any]  # what the writer noted
    entries: dict[str, Entry]
    at: int  # of the first tensor in the file


class CopyMemory:
    """The slots in a file. One process writes at a time. Raises OSError when there is no memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self._number = 0  # of the newest copy

    def copies(self) -> list[HeldCopy]:
        """The whole copies, newest first; at most two."""
        found = [copy for slot in range(2) if (copy := self._read(slot)) is not None]
        return sorted(found, key=lambda copy: -copy.number)

    def go_on_from(self, copy: HeldCopy) -> None:
        """The next copy follows this one. The other one is dropped: it may be newer, and not all ranks have it."""
        self._number = copy.number
        os.pwrite(self._descriptor, bytes(HEADER.size), self._start_of(copy.number + 1))

    @staticmethod
    def _start_of(number: int) -> int:
        return number % 2 * SLOT_BYTES

    def write(self, version: int, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Copy the state over the older copy. Of a DTensor the local piece is copied."""
        number = self._number + 1
        start = self._start_of(number)
        pieces = {key: local(tensor) for key, tensor in state.items()}
        if any(piece.is_cuda for piece in pieces.values()) and not self._buffer.is_pinned():
            self._buffer = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        entries, at = [], 0
        for key, piece in pieces.items():
            entries.append([key, str(piece.dtype).removeprefix("torch."), list(state[key].shape), piece.nbytes, at])
            at += _aligned(piece.nbytes)
        table = json.dumps({"about": dict(about), "entries": entries}).encode()
        os.pwrite(self._descriptor, bytes(HEADER.size), start)
        _write(self._descriptor, memoryview(table), start + TABLE_AT)
        stream = _Stream(self._descriptor, start + TABLE_AT + _aligned(len(table)), self._buffer)
        for piece in pieces.values():
            stream.put(piece)
        checksums = zlib.crc32(table), stream.end()
        header = HEADER.pack(MAGIC, number, version, len(table), at, *checksums, 0)[:-4]
        os.pwrite(self._descriptor, header + struct.pack("<I", zlib.crc32(header)), start)
        self._number = number

    def load(self, copy: HeldCopy, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors (of a DTensor the local piece). Raises CheckpointError for another form."""
        for key, target in targets.items():
            entry, piece = copy.entries.get(key), local(target)
            form = str(piece.dtype).removeprefix("torch."), piece.nbytes
            if entry is None or form != (entry.dtype, entry.n_bytes):
                held = "missing" if entry is None else f"{entry.dtype}, {entry.n_bytes} bytes"
                raise CheckpointError(f"mismatch in a copy in memory: {key!r} is {held}; here {form}")
            is_direct = piece.device.type == "cpu" and piece.is_contiguous()
            host = piece if is_direct else torch.empty(piece.shape, dtype=piece.dtype)
            _read_into(self._descriptor, _bytes(host), copy.at + entry.at)
            if not is_direct:
                piece.copy_(host)

    def clear(self) -> None:
        """Drop all copies and free their memory."""
        os.ftruncate(self._descriptor, 0)
        self._number = 0

    def _read(self, slot: int) -> HeldCopy | None:
        """The copy in a slot; None if it is not whole."""
        start = slot * SLOT_BYTES
        header = os.pread(self._descriptor, HEADER.size, start)
        if len(header) < HEADER.size:
            return None
        magic, number, version, n_table, n_data, table_sum, data_sum, own = HEADER.unpack(header)
        if magic != MAGIC or own != zlib.crc32(header[:-4]):
            return None
        table = os.pread(self._descriptor, n_table, start + TABLE_AT)
        if zlib.crc32(table) != table_sum:
            return None
        found, at = json.loads(table), start + TABLE_AT + _aligned(n_table)
        if self._sum(at, n_data) != data_sum:
            return None
        entries = {key: Entry(kind, tuple(shape), n, place) for key, kind, shape, n, place in found["entries"]}
        return HeldCopy(number, version, found["about"], entries, at)

    def _sum(self, at: int, n_bytes: int) -> int | None:
        """Checksum of these bytes; None if the file ends before."""
        running = Checksum()
        for start in range(0, n_bytes, len(self._buffer)):
            part = self._buffer[: min(len(self._buffer), n_bytes - start)]
            if os.preadv(self._descriptor, [part.numpy().data], at + start) < len(part):
                return None
            running.add(part)
        return running.value()


class CopyReader:
    """A copy as `checkpoint.restore_state` reads it."""

    def __init__(self, memory: CopyMemory, copy: HeldCopy) -> None:
        self._memory, self._copy = memory, copy

    def forms(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Key without the prefix -> shape and dtype of the whole tensor."""
        return {
            key.removeprefix(prefix): TensorStorageMetadata(
                TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), []
            )
            for key, entry in self._copy.entries.items()
            if key.startswith(prefix)
        }

    def load(self, targets: Mapping[str, Tensor]) -> None:
        self._memory.load(self._copy, targets)


class _Stream:
    """Writes tensors one after the other through a buffer, and sums their bytes."""

    def __init__(self, descriptor: int, at: int, buffer: Tensor) -> None:
        self._descriptor, self._at, self._buffer = descriptor, at, buffer
        self._n, self._size = 0, len(buffer)  # bytes in the buffer, and its size
        self._sum = Checksum()

    def put(self, piece: Tensor) -> None:
        data, n_bytes, done = _bytes(piece.contiguous()), piece.nbytes, 0
        while done < n_bytes:
            n = min(n_bytes - done, self._size - self._n)
            part = data if n == n_bytes else data[done : done + n]
            self._sum.copy(part, self._buffer[self._n : self._n + n])
            done += n
            self._fill(n)
        if pad := -self._n % ALIGNED:
            self._sum.add(self._buffer[self._n : self._n + pad].zero_())
            self._fill(pad)

    def end(self) -> int:
        """The checksum, after all is written."""
        self._flush()
        return self._sum.value()

    def _fill(self, n: int) -> None:
        self._n += n
        if self._n == self._size:
            self._flush()

    def _flush(self) -> None:
        _write(self._descriptor, self._buffer[: self._n].numpy().data, self._at)
        self._at, self._n = self._at + self._n, 0


def local(tensor: Tensor) -> Tensor:
    """The piece on this rank, without gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _bytes(tensor: Tensor) -> Tensor:
    """(n_bytes,) uint8, a view of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNED) * ALIGNED


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        n = os.pwrite(descriptor, data, at)
        data, at = data[n:], at + n


def _read_into(descriptor: int, target: Tensor, at: int) -> None:
    data = target.numpy().data
    while data:
        n = os.preadv(descriptor, [data], at)
        if not n:
            raise CheckpointError(f"incomplete copy in memory: {len(data)} bytes are missing at {at}")
        data, at = data[n:], at + n


SHARE = 0.02  # of the time that copies may take
ALWAYS_S = 0.01  # a copy this short is made after every update
ROOM = 4  # times the memory of both slots must be available at the start
STATE_BYTES = 12  # a trained number and two moments, before the optimizer has a state


class MemoryCopies:
    """When a rank copies its state, and what it may begin from. Off where memory is missing, on all ranks."""

    def __init__(
        self,
        descriptor: int | None,
        *,
        owner: str,
        journal: Journal,
        n_here: int = 1,
        now: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        """`owner`: whose state it is; others' copies are dropped. `n_here`: learner ranks of this host. `used`:
        processor seconds, which other processes do not lengthen.
        """
        self._memory = None if descriptor is None else CopyMemory(descriptor)
        self._owner, self._n_here, self._journal, self._now, self._used = owner, n_here, journal, now, used
        found = [] if self._memory is None else self._memory.copies()
        self._offers = {copy.version: copy for copy in reversed(found) if copy.about["owner"] == owner}
        self._took_s = 0.0  # the last copy
        self._ended = now()

    @property
    def versions(self) -> list[int]:
        """Whole copies of this owner at the start."""
        return sorted(self._offers)

    def clear(self) -> None:
        """Drop all copies: this rank begins elsewhere."""
        self._offers = {}
        if self._memory is not None:
            self._memory.clear()

    def restore(self, actor: PPOActor, version: int) -> int | None:
        """Restore the state of this version into an actor with a loaded model. Returns the largest lag trained so far.

        Raises CheckpointError if the copy is of another model.
        """
        assert self._memory is not None
        copy = self._offers[version]
        self._memory.go_on_from(copy)
        reader = CopyReader(self._memory, copy)
        checkpoint.restore_state(reader, policy=actor.policy, optimizer=actor.optimizer, critic=actor.critic)
        reference = actor.kept_reference
        if reference is not None:
            reference.free()
            reader.load({f"{REFERENCE}/{name}": tensor for name, tensor in reference.parameters().items()})
        actor.rest()
        actor.version = version
        self._journal.write(Event.NOTE, text=f"begins at version {version} from the copy in memory")
        lag: int | None = copy.about["max_lag"]
        return lag

    def begin(self, actor: PPOActor) -> None:
        """Decide whether copies are made. A collective when sharded."""
        if self._memory is not None and not self._offers and (why := self._refusal(actor)):
            self._memory = None
            logger.warning("a dead learner goes back to its checkpoint, because no copy is held in memory: {}", why)
            self._journal.write(Event.NOTE, text=f"no copy is held in memory: {why}")
        (is_off,) = actor.policy.ranks.max([float(self._memory is None)])
        self._memory = None if is_off else self._memory

    def keep(self, actor: PPOActor, max_lag: int | None) -> bool:
        """Copy the state if it is due. Returns whether all ranks have. A collective when sharded."""
        if self._memory is None:
            return False
        ranks = actor.policy.ranks
        (is_due,) = ranks.max([float(ranks.index == 0 and self._is_due())])
        if not is_due:
            return False
        began, broken = self._used(), ""
        with self._journal.span("copy"):
            try:
                self._memory.write(actor.version, state_of(actor), {"owner": self._owner, "max_lag": max_lag})
            except OSError as error:
                broken = str(error)
            (has_failed,) = ranks.max([float(bool(broken))])
        self._ended, self._took_s = self._now(), self._used() - began
        if has_failed:
            logger.warning("copies in memory end: {}", broken or "another rank has no memory")
            self.clear()
            self._memory = None
        return not has_failed

    def _is_due(self) -> bool:
        took_s = self._took_s
        return took_s <= ALWAYS_S or took_s <= SHARE * (self._now() - self._ended + took_s)

    def _refusal(self, actor: PPOActor) -> str:
        """Why there is too little memory; "" if there is enough."""
        n_trained = sum(local(one).numel() for one in actor.policy.parameters().values())
        held = sum(local(tensor).nbytes for tensor in state_of(actor).values())
        need, free = 2 * max(held, STATE_BYTES * n_trained) * self._n_here, available_bytes()
        if need * ROOM <= free:
            return ""
        return f"two copies take {need / 2**30:.1f} GiB, more than a quarter of the {free / 2**30:.1f} GiB available"


def state_of(actor: PPOActor) -> dict[str, Tensor]:
    """All that a restarted learner needs beside its model folder, by the keys of a checkpoint."""
    state = checkpoint.training_state(actor.policy, actor.optimizer, actor.critic, has_masters=True)
    reference = actor.kept_reference
    if reference is not None:
        reference.free()
        state |= {f"{REFERENCE}/{name}": tensor.detach() for name, tensor in reference.parameters().items()}
    return state


V2 = "memory.max", "memory.current", "inactive_file"  # files of a control group, and a line of its memory.stat
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: of the machine, and of its control groups up to the root."""
    least = dict(_numbers(proc / "meminfo")).get("MemAvailable:", 0) << 10
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, kind, path = line.split(":", 2)
        inner = Path(path.strip("/"))
        for one in (inner, *inner.parents) if kind in ("", "memory") else ():
            room = _room(groups / kind / one, *(V1 if kind else V2))
            least = least if room is None else min(least, room)
    return least


def _room(group: Path, most: str, used: str, cached: str) -> int | None:
    """Bytes up to the limit of a control group; None without one, and where a container does not show the group."""
    try:
        limit = (group / most).read_text(encoding="utf-8").strip()
        taken = int((group / used).read_text(encoding="utf-8"))
        taken -= dict(_numbers(group / "memory.stat")).get(cached, 0)
    except (OSError, ValueError):
        return None
    return int(limit) - taken if limit.isdecimal() else None


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The lines "NAME NUMBER ..." of a file of the kernel."""
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if (words := rest.split()) and words[0].isdecimal():
            yield name, int(words[0])
