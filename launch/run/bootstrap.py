"""Rendezvous of the ranks: rank, size and an allgather of bytes, over MPI or over ZeroMQ (launcher's environment).

MPI_Init holds the GIL, so a forked process enforces its time limit.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from areal_bus.config.sections import LaunchConfig
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.process import parent_death
from areal_bus.process.parent_death import die_with_parent
from areal_bus.transport.listener import BACKLOG
from launch.plan.network import temporary_parent, too_long
from launch.run.job_id import job_id

RANK_VARIABLES = (  # (rank, size) of each known launcher, most specific first
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
)
POLL_S = 0.002
MAX_PART_BYTES = 1 << 20  # of one rank's message
LINGER_MS = 2000  # time to send a rank's last message
RANK_0_LINGER_MS = 10_000  # time to send rank 0's last answers, for which the other ranks wait
MAX_QUEUED_PARTS = 4  # messages of one peer in rank 0's receive queue


class Bootstrap(Protocol):
    """The ranks of one launch."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. All ranks call it. Raises RanksMissing after launch.timeout_s."""

    def finish_exchanges(self) -> None:
        """Close the sockets: no allgather follows."""

    def close(self) -> None:
        """Release everything. The last call."""


class RanksMissing(ArealBusError):
    """Ranks did not arrive in time. Start the job again."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        verb = "answer" if list(ranks) == [0] else "come"  # rank 0 may wait for others
        super().__init__(f"all ranks must meet within launch.timeout_s = {timeout_s:g}: rank {names} did not {verb}")


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and size from the launcher's environment; (0, 1) without a launcher. Raises ConfigError for bad values."""
    for names in RANK_VARIABLES:
        if all(name in environ for name in names):
            rank, size = (environ[name] for name in names)
            if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
                return int(rank), int(size)
            rule = "the launcher must number ranks from 0 to size - 1"
            raise ConfigError(f"{rule}: {names[0]} is {rank!r} and {names[1]} {size!r}")
    return 0, 1


def open_bootstrap(config: LaunchConfig, environ: Mapping[str, str] = os.environ) -> Bootstrap:
    if config.bootstrap == "env":
        return EnvBootstrap(config.rendezvous, config.timeout_s, environ)
    return MpiBootstrap(config.timeout_s)


class MpiBootstrap:
    """Exchanges over MPI with point-to-point calls: a late rank can be named, and waiting ranks sleep."""

    def __init__(self, timeout_s: float) -> None:
        if is_one_host_of_open_mpi(os.environ):
            os.environ.setdefault("OMPI_MCA_pml", "ob1")  # one host: saves about a second of MPI_Init
            os.environ.setdefault("OMPI_MCA_btl", "self,sm")
        with bounded(rank_and_size()[0], timeout_s):
            from mpi4py import MPI  # the import calls MPI_Init: import it nowhere else

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self._timeout_s = timeout_s
        started = rank_and_size()[1]
        if self.size != started:
            fault = f"mismatch of ranks: MPI has {self.size}, the launcher {started}"
            raise ConfigError(f'{fault}; use the mpirun of this environment, or set launch.bootstrap = "env"')

    def allgather(self, data: bytes) -> list[bytes]:
        deadline = time.monotonic() + self._timeout_s
        if self.rank:
            self._send(data, 0, deadline)
            return unpack(self._receive([0], deadline)[1])
        parts = {0: data}
        while len(parts) < self.size:
            source, part = self._receive([r for r in range(self.size) if r not in parts], deadline)
            parts[source] = part
        gathered = [parts[rank] for rank in range(self.size)]
        for rank in range(1, self.size):
            self._send(pack(gathered), rank, deadline)
        return gathered

    def _send(self, data: bytes, to: int, deadline: float) -> None:
        request = self._world.Isend([bytearray(data), self._mpi.BYTE], dest=to)
        while not request.Test():
            self._pause([to], deadline)

    def _receive(self, sources: Sequence[int], deadline: float) -> tuple[int, bytes]:
        status = self._mpi.Status()
        while True:
            for source in sources:
                if self._world.Iprobe(source=source, status=status):
                    buffer = bytearray(status.Get_count(self._mpi.BYTE))
                    self._world.Recv([buffer, self._mpi.BYTE], source=source)
                    return source, bytes(buffer)
            self._pause(sources, deadline)

    def _pause(self, missing: Sequence[int], deadline: float) -> None:
        if time.monotonic() > deadline:
            raise RanksMissing(missing, self._timeout_s)
        time.sleep(POLL_S)

    def finish_exchanges(self) -> None:
        """Nothing to close: MPI stays idle until the end."""

    def close(self) -> None:
        """MPI_Finalize, which waits for all ranks. A failed rank skips it, so that mpirun ends the job."""
        self._mpi.Finalize()


def is_one_host_of_open_mpi(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's launcher has started all ranks on this host. Other launchers do not set these variables."""
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    return size is not None and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size


class EnvBootstrap:
    """Exchanges over ZeroMQ: rank 0 binds a ROUTER at the rendezvous, the other ranks connect to it."""

    def __init__(self, rendezvous: str, timeout_s: float, environ: Mapping[str, str] = os.environ) -> None:
        self.rank, self.size = rank_and_size(environ)
        self._timeout_s = timeout_s
        if why := too_long(rendezvous):
            raise ConfigError(f"launch.rendezvous is too long: {why}")
        self._folder: Path | None = None
        url = rendezvous or f"ipc://{self._private_folder(environ) / 'rendezvous.sock'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if self.rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS if self.rank else RANK_0_LINGER_MS)
        if self.rank == 0:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES)
            self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_PARTS)
            self._socket.setsockopt(zmq.BACKLOG, max(BACKLOG, self.size))
        else:
            self._socket.setsockopt(zmq.IDENTITY, identity(self.rank))
        try:
            (self._socket.connect if self.rank else self._socket.bind)(url)
        except zmq.ZMQError as error:
            self.close()
            rule = "an address that every rank can reach" if self.rank else "free at rank 0"
            raise ConfigError(f"launch.rendezvous must be {rule}: {url}: {error}") from None

    def _private_folder(self, environ: Mapping[str, str]) -> Path:
        """A folder with mode 0700, the same for all ranks of this launch on this host."""
        job = job_id(environ, alone=f"parent-{parent_death.pid()}")
        name = f"areal-bus-{os.getuid()}-{job}"
        folder = temporary_parent(len(name)) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            rule = "the rendezvous folder must belong to this user, with mode 0700"
            raise ConfigError(f"{rule}: remove {folder}, or set launch.rendezvous")
        self._folder = folder
        return folder

    def allgather(self, data: bytes) -> list[bytes]:
        deadline = time.monotonic() + self._timeout_s
        if self.rank:
            self._socket.send(data)
            return unpack(self._receive([0], deadline)[0])
        parts = {0: data}
        while len(parts) < self.size:
            missing = [rank for rank in range(self.size) if rank not in parts]
            sender, *frames = self._receive(missing, deadline)
            rank = rank_of(sender)
            if rank in missing and len(frames) == 1:  # anything else is not from a rank of this job
                parts[rank] = frames[0]
        self._remove_folder()  # all ranks are connected
        gathered = [parts[rank] for rank in range(self.size)]
        for rank in range(1, self.size):
            try:
                self._socket.send_multipart([identity(rank), pack(gathered)])
            except zmq.ZMQError:  # ROUTER_MANDATORY: the rank disconnected
                raise RanksMissing([rank], self._timeout_s) from None
        return gathered

    def _receive(self, sources: Sequence[int], deadline: float) -> list[bytes]:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not self._socket.poll(int(1000 * left_s) + 1):
            raise RanksMissing(sources, self._timeout_s)
        return self._socket.recv_multipart()

    def finish_exchanges(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    def close(self) -> None:
        self.finish_exchanges()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None and self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def identity(rank: int) -> bytes:
    """ZeroMQ identity of a rank's DEALER. It must not begin with a zero byte."""
    return b"r" + rank.to_bytes(4, "little")


def rank_of(sender: bytes) -> int | None:
    """The rank of an identity; None for any other identity."""
    return int.from_bytes(sender[1:], "little") if len(sender) == 5 and sender[:1] == b"r" else None


def pack(parts: Sequence[bytes]) -> bytes:
    """Encode parts as one message: their number, their lengths, then their bytes."""
    return struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def unpack(data: bytes) -> list[bytes]:
    (n,) = struct.unpack_from("<Q", data)
    parts, at = [], 8 * (n + 1)
    for length in struct.unpack_from(f"<{n}Q", data, 8):
        parts.append(data[at : at + length])
        at += length
    return parts


@contextlib.contextmanager
def bounded(rank: int, timeout_s: float) -> Iterator[None]:
    """Kill this process, with a line that names the rank, unless the block ends within `timeout_s`. It forks: enter it
    before MPI_Init, and before this process has threads or sockets.
    """
    read, write = os.pipe()
    ours = os.getpid()
    watcher = os.fork()
    if not watcher:
        os.close(write)
        _watch(read, ours, rank, timeout_s)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(watcher, 0)


def _watch(read: int, watched: int, rank: int, timeout_s: float) -> None:
    """Body of the watcher process. Ends when the pipe closes or the watched process ends; kills it on timeout."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(watched)
        if not select.select([read], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):  # the reader is gone
                os.write(2, f"rank {rank}: {sentence(timeout_s, watched)}\n".encode())
            os.kill(watched, signal.SIGKILL)
    finally:
        os._exit(0)


def sentence(timeout_s: float, process: int) -> str:
    still = f"process {process} on {socket.gethostname()} is still in it: a rank did not start, or mpirun is gone"
    remedy = "start the job again, with a larger launch.timeout_s if ranks need longer"
    return f"MPI_Init must return within launch.timeout_s = {timeout_s:g}; {still}; {remedy}"
