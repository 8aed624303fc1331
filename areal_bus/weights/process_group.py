"""torch.distributed for pushes: a store on one address, and groups without a default world.

No thread blocks on an operation: gloo may not detect a dead peer. Failed groups are retired with stuck operations.
"""

import atexit
import contextlib
import ctypes
import functools
import ipaddress
import os
import queue
import re
import socket
import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import ConfigError, PushFailed
from areal_bus.foreign_text import ERROR
from areal_bus.process.isolation import raise_file_limit
from areal_bus.weights.waits import PushWaits, Wakeup

WINDOW = 2  # concurrent broadcasts: one is verified and copied while the next arrives
STORE_TIMEOUT_S = 30.0  # time limit of one store request
GLOO_OPTIONS = ("_timeout", "_devices", "_threads")  # underscored: another torch may not have them
NAMELESS = "127.83.71.3"  # a loopback address without a name in /etc/hosts
MOST_FILES = 1 << 16
FILES_A_MEMBER = 4  # three connections to the store, and those of gloo while a view meets
OTHER_FILES = 128
BACKLOG = 4096  # connections that wait to be accepted: a view's members come all at once


def check_torch(gloo: Any = ProcessGroupGloo) -> None:
    """Raises ConfigError when this torch lacks the underscored names that push groups need."""
    options: Any = getattr(gloo, "_Options", None)
    made = options() if options is not None else None
    missing = [f"_Options.{name}" for name in GLOO_OPTIONS if not hasattr(made, name)]
    missing += [] if hasattr(gloo, "create_device") else ["create_device"]
    if missing:
        why = f"its ProcessGroupGloo lacks {', '.join(missing)}, which weight pushes need"
        remedy = 'install a torch of the tested range: pip install "torch>=2.11,<2.14"'
        raise ConfigError(f"unsupported torch {torch.__version__}: {why}; {remedy}")


check_torch()


@functools.cache
def print_numeric_peers() -> None:
    """Keep torch from asking a name server for the names of its peers. Call it before the process has other threads.

    torch.distributed looks up the name of each peer of a TCPStore, for its log. Without an answer the first look-up of
    a process takes 10 s; then torch prints addresses only (seen with torch 2.13). So its first look-up, of an address
    that has no name, fails at once here: the resolver of its thread may not ask. Forks inherit the outcome.
    """
    before, stderr, null = os.environ.get("RES_OPTIONS"), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.environ["RES_OPTIONS"] = "attempts:0"  # read by glibc at the first look-up of each thread
    os.dup2(null, 2)  # torch warns of it
    try:
        connection = threading.Thread(target=_connect_to_itself)
        connection.start()
        connection.join()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
        del os.environ["RES_OPTIONS"]
        if before is not None:
            os.environ["RES_OPTIONS"] = before


def _connect_to_itself() -> None:
    with contextlib.suppress(ConfigError, PushFailed):  # no such address: names are looked up as before
        store, endpoint = serve_store(NAMELESS)
        join_store(endpoint, 1.0)
        del store


def serve_store(address: str, *, n_members: int = 0) -> tuple[TCPStore, str]:
    """A TCPStore that listens on `address` only, and its "host:port". Raises ConfigError for an invalid address, and
    when `n_members` need more open files than this process may have.

    TCPStore alone listens on every interface, so it is given a socket that is already bound.
    """
    ip = _numeric(address)
    needed, limit = OTHER_FILES + FILES_A_MEMBER * n_members, raise_file_limit(MOST_FILES)
    if needed > limit:
        what = f"learner 0 needs {needed} open files to push weights to {n_members} generators"
        raise ConfigError(f"{what}: the limit is {limit}; raise the hard limit (ulimit -Hn)")
    listener = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
    try:
        listener.bind((str(ip), 0))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the weight store needs an address of this host: {address}: {error.strerror}") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        str(ip),
        port,
        is_master=True,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    return store, f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def join_store(endpoint: str, timeout_s: float) -> TCPStore:
    """A client of the store at "host:port". Raises PushFailed when it does not answer within `timeout_s`."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:  # plain connection first: TCPStore itself fails slowly, with a long log
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
        limit = timedelta(seconds=max(timeout_s, 1.0))
        return TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise PushFailed(f"cannot reach the store of learner 0: {endpoint!r}: {brief(error)}") from error


class StoreListener:
    """Gloo device on one address, or on the first address of an interface. Never on all interfaces."""

    def __init__(self, address: str, interface: str) -> None:
        """Raises ConfigError when neither is given."""
        self._address = str(_numeric(address)) if address else ""
        self._interface = interface
        if not address and not interface:
            raise ConfigError("missing interface: collectives need an address or one named interface")

    @cached_property
    def device(self) -> Any:
        """Opened at first use, because its thread wakes up a hundred times a second from then on."""
        if self._address:
            return ProcessGroupGloo.create_device(hostname=self._address)
        return ProcessGroupGloo.create_device(interface=self._interface)


class Operation:
    """An operation of gloo in flight. Its end wakes the thread of the push."""

    def __init__(self, work: Any, wake: Wakeup) -> None:
        self._work = work
        self._future = work.get_future()
        self._future.add_done_callback(lambda _: wake.set())  # on a thread of gloo

    def done(self) -> bool:
        return bool(self._future.done())

    def check(self) -> None:
        """Raises RuntimeError when it has failed. Only once it is done."""
        self._work.wait()


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """One rank's place in a named group of `size` ranks."""

    name: str
    rank: int
    size: int


class PushGroup:
    """Sender (rank 0) and receivers. `broadcast` sends bytes; `report` sends one status byte for each receiver.

    They use two gloo groups, so that the sender can wait for the reports from the start. That wait fails at once when a
    receiver dies, independent of the broadcasts.
    """

    def __init__(self, place: GroupPlace, store: TCPStore, *, device: Any, wake: Wakeup, timeout_s: float) -> None:
        """`device`: of gloo. Raises RuntimeError when the other ranks do not come within `timeout_s`."""
        self._rank = place.rank
        self._size = place.size
        self._wake = wake
        self._data = gloo(PrefixStore(f"{place.name}/data", store), place.rank, place.size, device, timeout_s)
        self._control = gloo(PrefixStore(f"{place.name}/control", store), place.rank, place.size, device, timeout_s)
        self._operations: list[Operation] = []  # in flight
        self._staging: list[Tensor] = []
        _alive.add(self)

    def staging(self, n_bytes: int, *, pin: bool) -> list[Tensor]:
        """Receive buffers of the group. Late data of a retired group is written here, never into weights."""
        if not self._staging or self._staging[0].numel() < n_bytes:
            self._staging = [torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(WINDOW)]
        return [buffer[:n_bytes] for buffer in self._staging]

    def broadcast(self, bucket: Tensor, timeout_s: float) -> Operation:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        return self._started(self._data.broadcast([bucket], options))

    def report(self, status: int, timeout_s: float) -> tuple[Operation, list[Tensor]]:
        """Send `status` (0 to 255) to rank 0, which receives a (1,) uint8 tensor from each rank, itself first."""
        options = GatherOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        mine = torch.tensor([status], dtype=torch.uint8)
        all_ = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._size)] if self._rank == 0 else []
        return self._started(self._control.gather([all_] if all_ else [], [mine], options)), all_

    def check(self) -> None:
        """Raises RuntimeError when an operation in flight has failed."""
        for operation in [operation for operation in self._operations if operation.done()]:
            self._operations.remove(operation)
            operation.check()

    @property
    def busy(self) -> bool:
        return any(not operation.done() for operation in self._operations)

    def _started(self, work: Any) -> Operation:
        operation = Operation(work, self._wake)
        self._operations.append(operation)
        return operation


def meet(name: str, store: TCPStore, waits: PushWaits, *, rank: int, size: int, listener: StoreListener) -> PushGroup:
    """Build the group of that name with all its ranks. Raises PushFailed and RuntimeError like `PushWaits.until`.

    Gloo's rendezvous ends only at its time limit, even if a member has died. So it runs on its own thread, which is
    abandoned if the push ends first. It uses its own store connection, because a wait blocks a connection.
    """
    outcome: queue.SimpleQueue[PushGroup | Exception] = queue.SimpleQueue()
    place, wake, left_s = GroupPlace(name, rank, size), waits.wake, waits.left_s

    def build() -> None:
        try:
            own = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            device = listener.device
            outcome.put(PushGroup(place, own, device=device, wake=wake, timeout_s=left_s))
        except Exception as error:  # noqa: BLE001  raised again below
            outcome.put(error)
        wake.set()

    threading.Thread(target=build, name=f"meets {name}", daemon=True).start()
    waits.until(lambda: not outcome.empty(), lambda: "the members to build a group")
    found = outcome.get()
    if isinstance(found, Exception):
        raise found
    return found


_alive: weakref.WeakSet[PushGroup] = weakref.WeakSet()
_retired: list[PushGroup] = []


def retire(group: PushGroup) -> None:
    """Drop a group. One with stuck operations is kept until they end, because its destructor would wait for them."""
    _retired[:] = [old for old in _retired if old.busy]
    if group.busy:
        _retired.append(group)


def brief(error: BaseException) -> str:
    """First sentence of an error of torch or gloo, without source locations."""
    text = re.sub(r"\[[^\[\]]*\.(?:cc|h|cpp):\d+\] *", "", str(error)[:ERROR]).split("\n")[0]
    return text.split(". ")[0].strip() or type(error).__name__


@atexit.register
def _abandon() -> None:
    """At exit, leak groups with stuck operations; otherwise the exit waits for their deadline."""
    for group in list(_alive):
        if group.busy:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def gloo(store: PrefixStore, rank: int, size: int, device: Any, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as in torch.distributed
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    options._threads = WINDOW
    return ProcessGroupGloo(store, rank, size, options)


def _numeric(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigError(f"the weight push needs a numeric address of one interface: got {address!r}") from error
    if ip.is_unspecified:
        raise ConfigError(f"the weight push listens on one named interface: {address!r} means all of them")
    return ip
