"""Memory that other processes can open, on the same host (memfd, /proc/PID/fd/N) or CUDA device (torch's IPC).

A handle is plain JSON, no pickle. The kernel frees host memory with the last process that maps it.
"""

import base64
import fcntl
import mmap
import os
import re
import socket
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from areal_bus.errors import PushFailed
from areal_bus.weights.process_group import brief

Handle = dict[str, Any]  # JSON types only

MODE = 0o600
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # its size cannot change while others map it
CUDA_HANDLE_BYTES = range(64, 4097)  # cudaIpcMemHandle_t with the prefix of torch
COUNTER = re.compile(r"/torch_[0-9_]{1,80}")  # name of torch's file of reference counters
N_COUNTERS = 10_000  # counters in such a file


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Location of memory: processes with equal places can open each other's memory."""

    realm: str  # boot id, PID namespace and user
    device: str  # "cpu", or the UUID of a CUDA device
    host: str = field(compare=False)  # for people

    def __str__(self) -> str:
        return f"{self.device} of {self.host}"


def place_of(device: torch.device) -> MemoryPlace:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    realm = f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    name = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return MemoryPlace(realm, name, socket.gethostname())


def refusal(n_bytes: int) -> str:
    """Why this process cannot allocate shared host memory of this size; "" if it can. Uses no memory."""
    try:
        SharedMemory(n_bytes, torch.device("cpu"))
    except (OSError, RuntimeError, AttributeError) as error:  # a Python may be built without memfd
        return brief(error)
    return ""


class SharedMemory:
    """Shareable memory. `data` is (n_bytes,) uint8, initially zero; other processes open it by `handle`."""

    data: Tensor
    handle: Handle

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.device = device
        size = max(n_bytes, 1)  # an empty mapping is impossible
        if device.type == "cpu":
            self.data, self.handle = self._on_host(size)
        else:
            self.data = torch.zeros(size, dtype=torch.uint8, device=device)
            # shared once: each further call would hold an event and a counter until the memory is freed
            self.handle = cuda_handle(self.data.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
        self.data = self.data[:n_bytes]

    def _on_host(self, size: int) -> tuple[Tensor, Handle]:
        descriptor = os.memfd_create("areal-bus-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        os.fchmod(descriptor, MODE)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        found = os.fstat(descriptor)
        handle = {"pid": os.getpid(), "fd": descriptor, "inode": [found.st_dev, found.st_ino], "size": size}
        return data, {"kind": "host"} | handle


def cuda_handle(shared: tuple[Any, ...]) -> Handle:
    """Handle from the result of `_share_cuda_`. Omits the event: the sender synchronises before it publishes."""
    _, memory, size, offset, counter, counter_offset, _, _ = shared
    return {
        "kind": "cuda",
        "memory": base64.b64encode(memory).decode(),
        "size": size,
        "offset": offset,
        "counter": counter.decode(),
        "counter_offset": counter_offset,
    }


@dataclass(frozen=True, slots=True)
class Opened:
    """Opened memory of another process, read-only by convention; it may change at any time: verify a copy."""

    data: Tensor  # (n_bytes,) uint8
    _view: mmap.mmap | None  # its mapping; None on a device

    def release(self, start: int, stop: int) -> None:
        """Release pages that were read, so that they no longer count as memory of this process."""
        first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if self._view is not None and first < last:
            with suppress(OSError):  # locked pages
                self._view.madvise(mmap.MADV_DONTNEED, first, last - first)


def open_memory(handle: Handle, n_bytes: int, device: torch.device) -> Opened:
    """Open the first `n_bytes` of the memory of `handle`. Raises PushFailed on failure."""
    try:
        kind: Literal["host", "cuda"] = handle["kind"]
        view = _open_host(handle) if kind == "host" else None
        opened = _open_cuda(handle, device) if view is None else torch.frombuffer(view, dtype=torch.uint8)
    except (KeyError, TypeError, ValueError) as error:
        raise PushFailed(f"missing or invalid field in a handle of shared memory: {str(handle)[:300]}") from error
    except (OSError, RuntimeError) as error:
        raise PushFailed(f"cannot open the shared memory of learner 0: {handle}: {brief(error)}") from error
    if len(opened) < n_bytes:
        raise PushFailed(f"shared memory too small: {len(opened)} bytes, and the manifest has {n_bytes}")
    return Opened(opened[:n_bytes], view)


def _open_host(handle: Handle) -> mmap.mmap:
    pid, number, size = _count(handle["pid"]), _count(handle["fd"]), _count(handle["size"])
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if [found.st_dev, found.st_ino] != handle["inode"] or found.st_size < size:
            raise OSError(f"descriptor {number} of process {pid} is a different file now")
        return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE)  # a write would go to a private page
    finally:
        os.close(descriptor)


def _open_cuda(handle: Handle, device: torch.device) -> Tensor:
    """torch closes the handle and decrements its counter when the last local tensor of the memory is freed."""
    memory, counter = base64.b64decode(handle["memory"], validate=True), str(handle["counter"])
    size, offset, at = _count(handle["size"]), _count(handle["offset"]), _count(handle["counter_offset"])
    if handle["kind"] != "cuda" or len(memory) not in CUDA_HANDLE_BYTES or not COUNTER.fullmatch(counter):
        raise ValueError("not a CUDA IPC handle of torch")
    if at >= N_COUNTERS or device.type != "cuda":
        raise ValueError("no such counter, or no CUDA device to open it on")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, memory, size, offset, counter.encode(), at, b"", False)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value
