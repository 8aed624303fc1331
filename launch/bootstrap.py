"""How ranks meet: a number, a count and a few exchanges of bytes; knows nothing of what is exchanged.

`MpiBootstrap` uses MPI for these exchanges only; afterwards MPI is idle. `EnvBootstrap` takes rank and size from the
environment that the starter (mpirun, srun, torchrun) sets and exchanges over ZeroMQ, without MPI_Init.
"""

import hashlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from areal_bus.config.sections import LaunchConfig
from areal_bus.errors import ArealBusError, ConfigError
from areal_bus.transport.listener import BACKLOG
from launch.init_watch import bounded

RANKS = (  # (rank, size) as known starters name them, most specific first
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
)
JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_JOBID", "TORCHELASTIC_RUN_ID")
POLL_S = 0.002
MAX_PART_BYTES = 1 << 20  # of what one rank tells the others
LINGER_MS = 2000  # of a rank: for its last part to leave
LINGER_0_MS = 10_000  # of rank 0: for its last answers to leave; the ranks wait for them
MAX_WAITING = 4  # parts of one peer that may wait at rank 0


class Bootstrap(Protocol):
    """The ranks of one start."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; all ranks call it. Raises Missing after launch.timeout_s."""

    def rest(self) -> None:
        """No exchange follows: nothing of this listens any more."""

    def close(self) -> None:
        """The last call."""


class Missing(ArealBusError):
    """Ranks that did not arrive in time: start anew."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        verb = "answer" if list(ranks) == [0] else "come"  # rank 0 may wait for others
        super().__init__(f"all ranks must meet within launch.timeout_s = {timeout_s:g}: rank {names} did not {verb}")


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """From the environment that the starter set; (0, 1) when there is none. Raises ConfigError for no such rank."""
    for names in RANKS:
        if all(name in environ for name in names):
            rank, size = (environ[name] for name in names)
            if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
                return int(rank), int(size)
            raise ConfigError(f"a starter counts ranks from 0: {names[0]} is {rank!r} and {names[1]} {size!r}")
    return 0, 1


def open_bootstrap(config: LaunchConfig, environ: Mapping[str, str] = os.environ) -> Bootstrap:
    """The kind that `launch.bootstrap` names."""
    if config.bootstrap == "env":
        return EnvBootstrap(config.rendezvous, config.timeout_s, environ)
    return MpiBootstrap(config.timeout_s)


class MpiBootstrap:
    """Exchanges over MPI by point-to-point buffer calls, so that a rank that is late is named and nobody spins."""

    def __init__(self, timeout_s: float) -> None:
        if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ.get("OMPI_COMM_WORLD_SIZE"):
            os.environ.setdefault("OMPI_MCA_pml", "ob1")  # one host: saves about a second of MPI_Init
            os.environ.setdefault("OMPI_MCA_btl", "self,sm")
        with bounded(rank_and_size()[0], timeout_s):
            from mpi4py import MPI  # the import initialises MPI: nothing else may import it

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self._timeout_s = timeout_s
        started = rank_and_size()[1]
        if self.size != started:
            raise ConfigError(
                f"MPI and the starter must agree on the ranks: MPI has {self.size}, the starter {started}; use the "
                'mpirun of this environment, or set launch.bootstrap = "env"'
            )

    @property
    def rank(self) -> int:
        return self._world.Get_rank()

    @property
    def size(self) -> int:
        return self._world.Get_size()

    def allgather(self, data: bytes) -> list[bytes]:
        deadline = time.monotonic() + self._timeout_s
        if self.rank:
            self._send(data, 0, deadline)
            return unpack(self._receive([0], deadline)[1])
        parts = {0: data}
        while len(parts) < self.size:
            source, part = self._receive([r for r in range(self.size) if r not in parts], deadline)
            parts[source] = part
        everything = [parts[rank] for rank in range(self.size)]
        for rank in range(1, self.size):
            self._send(pack(everything), rank, deadline)
        return everything

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
            raise Missing(missing, self._timeout_s)
        time.sleep(POLL_S)

    def rest(self) -> None:
        """MPI opens nothing and waits for nobody until the end."""

    def close(self) -> None:
        """Wait for the others and leave MPI; a rank that fails does not come here, so that mpirun ends the job."""
        self._mpi.Finalize()


class EnvBootstrap:
    """Exchanges through rank 0's ROUTER at the rendezvous."""

    def __init__(self, rendezvous: str, timeout_s: float, environ: Mapping[str, str] = os.environ) -> None:
        self.rank, self.size = rank_and_size(environ)
        self._timeout_s = timeout_s
        self._folder: Path | None = None
        self._context = zmq.Context()
        url = rendezvous or f"ipc://{self._own_folder(environ) / 'rendezvous.sock'}"
        self._socket = self._context.socket(zmq.ROUTER if self.rank == 0 else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS if self.rank else LINGER_0_MS)
        if self.rank == 0:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES)
            self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
            self._socket.setsockopt(zmq.BACKLOG, max(BACKLOG, self.size))
            self._bind(url)
        else:
            self._socket.setsockopt(zmq.IDENTITY, identity(self.rank))
            self._connect(url)

    def _bind(self, url: str) -> None:
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"launch.rendezvous must be free at rank 0: {url}: {error}") from None

    def _connect(self, url: str) -> None:
        try:
            self._socket.connect(url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"launch.rendezvous must be an address that ranks can reach: {url}: {error}") from None

    def _own_folder(self, environ: Mapping[str, str]) -> Path:
        """A folder that only this user can enter, the same for all ranks of this start on this host."""
        job = next((environ[name] for name in JOBS if name in environ), f"parent-{os.getppid()}")
        digest = hashlib.sha256(f"{job}.{environ.get('SLURM_STEP_ID', '')}".encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"areal-bus-{os.getuid()}-{digest}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            raise ConfigError(
                f"the rendezvous folder must be this user's own: remove {folder}, or set launch.rendezvous"
            )
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
            if rank in missing and len(frames) == 1:  # whatever else comes here is a stranger's
                parts[rank] = frames[0]
        self._forget_folder()  # all are connected: nobody needs the path any more
        everything = [parts[rank] for rank in range(self.size)]
        for rank in range(1, self.size):
            try:
                self._socket.send_multipart([identity(rank), pack(everything)])
            except zmq.ZMQError:  # ROUTER_MANDATORY: it has gone
                raise Missing([rank], self._timeout_s) from None
        return everything

    def _receive(self, sources: Sequence[int], deadline: float) -> list[bytes]:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not self._socket.poll(int(1000 * left_s) + 1):
            raise Missing(sources, self._timeout_s)
        return self._socket.recv_multipart()

    def rest(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    def close(self) -> None:
        self.rest()
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None and self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def identity(rank: int) -> bytes:
    """Of a rank's DEALER: may not begin with a zero byte."""
    return b"r" + rank.to_bytes(4, "little")


def rank_of(sender: bytes) -> int | None:
    """Whose identity that is; None when it is no rank's."""
    return int.from_bytes(sender[1:], "little") if len(sender) == 5 and sender[:1] == b"r" else None


def pack(parts: Sequence[bytes]) -> bytes:
    """Parts in one piece: how many, how long each is, then all of them."""
    return struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def unpack(data: bytes) -> list[bytes]:
    (n,) = struct.unpack_from("<Q", data)
    parts, at = [], 8 * (n + 1)
    for length in struct.unpack_from(f"<{n}Q", data, 8):
        parts.append(data[at : at + length])
        at += length
    return parts
