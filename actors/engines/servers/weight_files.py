"""Hands weights to a server on this machine, as safetensors in a private folder in memory.

This process locks the folder. If it is killed while the folder has weights, the next process removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from areal_bus.errors import ConfigError, EngineLost

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
        """Remove the folders."""
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
