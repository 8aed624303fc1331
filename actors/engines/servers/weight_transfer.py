"""Hands weights to one server: as safetensors in a private folder in memory, or by broadcasts in a group of the two.

This process locks the folder. If it is killed while the folder has weights, the next process removes it.

The group is built as servers build theirs (`init_custom_process_group` of vLLM, SGLang and OpenRLHF): a TCPStore in
this process, a PrefixStore with the name and the prefix of torch's own helper on it, gloo. This process is rank 0; the
ranks of the server follow. The tensors are in host memory here; gloo copies them to a GPU at the server.
"""

import contextlib
import ctypes
import fcntl
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore  # type: ignore[attr-defined]

from areal_bus.errors import ConfigError, EngineLost
from areal_bus.weights.process_group import StoreListener, brief, gloo, serve_store

MEMORY = Path("/dev/shm")  # a tmpfs on Linux
PREFIX = "areal-bus-weights-"
FILE = "model.safetensors"
SPARE_BYTES = 1 << 20
SERVER_BYTES = 128 << 20  # that a server takes there itself: queues between its processes, mostly sparse


def check_shared_memory(weights: int, server: int, memory: Path = MEMORY) -> None:
    """Raises ConfigError if shared memory as a whole cannot hold weights on their way and a server's own."""
    need = weights + server
    if not need or not memory.is_dir() or (size := shutil.disk_usage(memory).total) >= need:
        return
    raise ConfigError(
        f"shared memory too small: {memory} has {size >> 20} MiB, and an engine server needs {need >> 20} MiB there "
        f"({weights >> 20} MiB for weights): start the container with --shm-size={(need >> 30) + 1}g or --ipc=host, or "
        "enlarge the tmpfs"
    )


class WeightFiles:
    """The folder exists until `close`, the weights only while the server loads them."""

    def __init__(self, memory: Path = MEMORY) -> None:
        """`memory`: a folder in memory; where it does not exist or is too small, the usual temporary folder serves."""
        self._memory = memory
        self._folders: dict[Path, tuple[Path, int]] = {}  # of memory or disk: ours in it, and its lock

    @contextmanager
    def holding(self, tensors: Mapping[str, Any], file: str = FILE) -> Iterator[Path]:
        """The folder, with these tensors in a file of this name. Raises EngineLost if there is no room."""
        n_bytes = sum(tensor.nbytes for tensor in tensors.values()) + SPARE_BYTES
        parent = _roomy(self._memory, n_bytes)
        if parent not in self._folders:
            sweep(parent)
            self._folders[parent] = _make(parent)
        folder, _ = self._folders[parent]
        try:
            _save(tensors, folder / file, n_bytes)
            yield folder
        finally:
            (folder / file).unlink(missing_ok=True)

    def close(self) -> None:
        for folder, lock in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._folders = {}


def sweep(parent: Path) -> None:
    """Remove folders of processes that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    """A new folder that only this user can read, and its lock. It gets its final name after it is locked."""
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(made, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(made.with_name(made.name.removeprefix("."))), lock


def _save(tensors: Mapping[str, Any], path: Path, n_bytes: int) -> None:
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise EngineLost(
            f"weights need {n_bytes >> 20} MiB in {path.parent.parent} on their way to the server: {error}"
        ) from None


def _roomy(memory: Path, n_bytes: int) -> Path:
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > n_bytes:
        return memory
    return Path(tempfile.gettempdir())


PAUSE_S = 0.002


class WeightBroadcast:
    """One group with one server. It cannot be used after a failure; then the server is given up, too."""

    def __init__(self, *, address: str, interface: str) -> None:
        self._store, endpoint = serve_store(address)
        host, _, port = endpoint.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self._device = StoreListener(address, interface).device
        self._group: Any = None
        self._under_way: list[Any] = []

    def meet(self, name: str, size: int, call: "Future[Any]", *, timeout_s: float) -> None:
        """Build the group with a server that `call` has asked to join. Raises EngineLost, or the error of the call."""
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def build() -> None:
            store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
            try:
                outcome.put(gloo(store, 0, size, self._device, timeout_s))
            except Exception as error:  # noqa: BLE001  raised again below, if anybody still waits
                outcome.put(error)

        threading.Thread(target=build, name=f"meets {name}", daemon=True).start()
        self._until(lambda: not outcome.empty() and call.done(), call, "join its update group", timeout_s)
        group = outcome.get()
        if isinstance(group, Exception):
            raise EngineLost(f"the server must join its update group: {brief(group)}") from group
        self._group = group

    def send(self, tensors: Sequence[Tensor], call: "Future[Any]", *, timeout_s: float) -> None:
        """Broadcast tensors, in order, to a server that `call` asked for. Raises EngineLost, or the call's error."""
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            self._under_way = [self._group.broadcast([tensor], options) for tensor in tensors]
            self._until(lambda: call.done() and self._is_sent(), call, "receive the weights", timeout_s)
        except RuntimeError as error:
            raise EngineLost(
                f"the server did not receive the weights within {timeout_s:g} s: {brief(error)}"
            ) from error
        self._under_way = []

    def close(self) -> None:
        """Leave the group. A group that is stuck stays until the process ends."""
        if any(not work.is_completed() for work in self._under_way):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # the destructor would wait for these broadcasts
        self._group = None

    def _is_sent(self) -> bool:
        for work in [work for work in self._under_way if work.is_completed()]:
            self._under_way.remove(work)
            work.wait()  # raises the error of the broadcast
        return not self._under_way

    def _until(self, done: Callable[[], bool], call: "Future[Any]", what: str, timeout_s: float) -> None:
        """Wait, by polling; the failure of the call ends the wait at once."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if call.done() and (error := call.exception()) is not None:
                raise error
            if time.monotonic() >= deadline:
                raise EngineLost(f"timed out: the server did not {what} within {timeout_s:g} s")
            time.sleep(PAUSE_S)
        call.result()
