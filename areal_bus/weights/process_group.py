"""torch.distributed as a push needs it: a store on one address, groups without a default world, waits that end.

Knows nothing of weights. Gloo tells of a dead peer only sometimes: an operation that was half sent when the peer died
is stuck until its own time limit (seen with torch 2.13), while another one fails at once. So nobody blocks on one:
`PushWaits` polls all of them, the store and the deadline, and a group that failed is retired with what is stuck in it.
"""

import atexit
import ctypes
import ipaddress
import queue
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, GatherOptions, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import ConfigError, PushFailed

WINDOW = 2  # broadcasts under way at once: one is verified and copied while the next one arrives
MAX_GROUPS = 4  # kept at once: the ring's view and a few catch-ups
STORE_TIMEOUT_S = 30.0  # one request to the store
OVER_S = 1.0  # that an operation of gloo may outlast its push
ALARM_S = 0.05  # how often a wait looks for the other side's alarm


def serve_store(address: str) -> tuple[TCPStore, str]:
    """A TCPStore that listens on `address` only, and its "host:port". Raises ConfigError for what is no such address.

    TCPStore by itself listens on every interface; given a socket that is bound already, it stays there.
    """
    ip = _numeric(address)
    listener = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
    try:
        listener.bind((str(ip), 0))
        listener.listen()
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
    """A client of the store at "host:port". Raises PushFailed when nothing answers there within `timeout_s`."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:  # a plain connection first: TCPStore's own failure takes long and prints a page
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
        limit = timedelta(seconds=max(timeout_s, 1.0))
        return TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise PushFailed(f"a member must reach the root's store: {endpoint!r}: {brief(error)}") from error


class StoreListener:
    """Where gloo listens: the address when there is one, else the interface's first. Never all of them."""

    def __init__(self, address: str, interface: str) -> None:
        """Raises ConfigError when that is none."""
        self._address = str(_numeric(address)) if address else ""
        self._interface = interface
        if not address and not interface:
            raise ConfigError("collectives need one named interface: neither an address nor an interface is given")

    @cached_property
    def device(self) -> Any:
        """Opened at the first use: its thread wakes a hundred times a second from then on, whatever there is to do."""
        if self._address:
            return ProcessGroupGloo.create_device(hostname=self._address)
        return ProcessGroupGloo.create_device(interface=self._interface)


class PushGroup:
    """Root (rank 0) and members of one view: `broadcast` carries bytes, `report` one status byte a member.

    The two are gloo groups of their own, so that the root can wait for the reports from the start: that wait fails at
    once when a member dies, whatever the broadcasts do.
    """

    def __init__(self, name: str, store: TCPStore, *, rank: int, size: int, device: Any, timeout_s: float) -> None:
        self.name = name
        self.size = size
        self._rank = rank
        self._data = gloo(PrefixStore(f"{name}/data", store), rank, size, device, timeout_s)
        self._control = gloo(PrefixStore(f"{name}/control", store), rank, size, device, timeout_s)
        self._works: list[Any] = []  # under way
        self._staging: list[Tensor] = []
        _alive.add(self)

    def staging(self, n_bytes: int, *, pin: bool) -> list[Tensor]:
        """Buffers to receive into. They belong to the group: what arrives late in a retired one hurts nobody."""
        if not self._staging or self._staging[0].numel() < n_bytes:
            self._staging = [torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(WINDOW)]
        return [buffer[:n_bytes] for buffer in self._staging]

    def broadcast(self, bucket: Tensor, timeout_s: float) -> Any:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        return self._started(self._data.broadcast([bucket], options))

    def report(self, status: int, timeout_s: float) -> tuple[Any, list[Tensor]]:
        """Send `status` (0 to 255) to the root; the root gets one (1,) uint8 tensor a rank, its own first."""
        options = GatherOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=timeout_s)
        mine = torch.tensor([status], dtype=torch.uint8)
        all_ = [torch.zeros(1, dtype=torch.uint8) for _ in range(self.size)] if self._rank == 0 else []
        return self._started(self._control.gather([all_] if all_ else [], [mine], options)), all_

    def check(self) -> None:
        """Raises RuntimeError when an operation under way has failed."""
        for work in [work for work in self._works if work.is_completed()]:
            self._works.remove(work)
            work.wait()

    @property
    def busy(self) -> bool:
        return any(not work.is_completed() for work in self._works)

    def _started(self, work: Any) -> Any:
        self._works.append(work)
        return work


def meet(name: str, store: TCPStore, watch: "PushWaits", *, rank: int, size: int, listener: StoreListener) -> PushGroup:
    """The group of that name, as soon as all have come. Raises PushFailed and RuntimeError as `PushWaits.until` does.

    Gloo's own meeting ends by its time limit alone, whoever has died meanwhile. So it is held on a thread, which is
    left to it when the push is over before; by a connection of its own, as a wait shuts a store's connection to others.
    """
    outcome: queue.SimpleQueue[PushGroup | Exception] = queue.SimpleQueue()
    left_s = watch.left_s

    def build() -> None:
        try:
            own = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
            outcome.put(PushGroup(name, own, rank=rank, size=size, device=listener.device, timeout_s=left_s))
        except Exception as error:  # noqa: BLE001  raised again below, if anybody still waits
            outcome.put(error)

    threading.Thread(target=build, name=f"meets {name}", daemon=True).start()
    watch.until(lambda: not outcome.empty(), lambda: "the members to meet")
    found = outcome.get()
    if isinstance(found, Exception):
        raise found
    return found


class PushGroups:
    """The groups of the last few views."""

    def __init__(self) -> None:
        self._by_view: dict[int, PushGroup] = {}

    def of_view(self, view: int) -> PushGroup | None:
        return self._by_view.get(view)

    def keep(self, view: int, group: PushGroup) -> None:
        self._by_view[view] = group
        while len(self._by_view) > MAX_GROUPS:
            self.drop_view(next(iter(self._by_view)))

    def drop_view(self, view: int) -> None:
        group = self._by_view.pop(view, None)
        if group is not None:
            retire(group)

    def clear(self) -> None:
        for view in list(self._by_view):
            self.drop_view(view)


class PushWaits:
    """The waits of one push on one side: they end by success, the deadline, `cancel`, or the other side's alarm."""

    def __init__(self, what: str, store: TCPStore, *, alarm: str, timeout_s: float, cancelled: threading.Event) -> None:
        self._what = what
        self._store = store
        self._alarm = alarm  # a key that the other side sets, with its reason, when it gives up
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._looked = 0.0

    @property
    def left_s(self) -> float:
        """Never 0, which torch takes for "no limit"."""
        return max(self._deadline - time.monotonic(), 0.05)

    @property
    def limit_s(self) -> float:
        """Of an operation: it outlasts the deadline, whose own sentence says more."""
        return self.left_s + OVER_S

    def until(self, done: Callable[[], bool], waits_for: Callable[[], str], group: PushGroup | None = None) -> None:
        """Poll until `done`. Raises PushFailed, or RuntimeError when an operation of `group` or the store fails."""
        pause = 0.0002
        while True:
            finished = done()  # asked before the check, which then sees whatever ended it
            if group is not None:
                group.check()
            if finished:
                return
            self.look(waits_for)
            self._cancelled.wait(pause)
            pause = min(pause * 1.5, 0.01)

    def look(self, waits_for: Callable[[], str], *, at_once: bool = False) -> None:
        """Raises PushFailed when the push is over: cancelled here, given up at the other side, or overdue.

        For the other side's alarm it looks only now and then, unless `at_once`.
        """
        now = time.monotonic()
        if self._cancelled.is_set():
            raise PushFailed(f"{self._what} was cancelled here; it waited for {waits_for()}")
        if at_once or now - self._looked >= ALARM_S:
            self._looked = now
            if self._store.check([self._alarm]):
                raise PushFailed(f"{self._what} was given up: {self._store.get(self._alarm).decode()}")
        if now >= self._deadline:
            raise PushFailed(
                f"{self._what} must be complete {self._timeout_s:g} s after its begin; it waits for {waits_for()}"
            )


_alive: weakref.WeakSet[PushGroup] = weakref.WeakSet()
_retired: list[PushGroup] = []


def retire(group: PushGroup) -> None:
    """Let go of a group. One with stuck operations is kept until they end: its destructor would wait for them."""
    _retired[:] = [old for old in _retired if old.busy]
    if group.busy:
        _retired.append(group)


def brief(error: BaseException) -> str:
    """The first sentence of an error of torch or gloo, without the place in their source."""
    text = re.sub(r"\[[^\]]*\.(?:cc|h|cpp):\d+\] *", "", str(error)).split("\n")[0]
    return text.split(". ")[0].strip() or type(error).__name__


@atexit.register
def _abandon() -> None:
    """At exit, groups with stuck operations are left to the operating system, or the exit would wait for a deadline."""
    for group in list(_alive):
        if group.busy:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def gloo(store: PrefixStore, rank: int, size: int, device: Any, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as torch.distributed itself makes them
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    options._threads = WINDOW
    return ProcessGroupGloo(store, rank, size, options)


def _numeric(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigError(f"the weight push needs a numeric address of one interface: {address!r} is none") from error
    if ip.is_unspecified:
        raise ConfigError(f"the weight push listens on one named interface: {address!r} means all of them")
    return ip
