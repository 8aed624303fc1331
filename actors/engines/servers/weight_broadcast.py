"""Weights from this process to one server: a torch.distributed group of the two, and broadcasts in it.

The group is built as servers build theirs (`init_custom_process_group` of vLLM, SGLang and OpenRLHF): a TCPStore in
this process, a PrefixStore with the name and the prefix of torch's own helper on it, gloo. This process is rank 0; the
ranks of the server follow. The tensors are in host memory here; gloo copies them to a GPU at the server.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore  # type: ignore[attr-defined]

from areal_bus.errors import EngineLost
from areal_bus.weights.process_group import StoreListener, brief, gloo, serve_store

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
        """Broadcast tensors, in order, to a server that `call` has asked to receive them; wait for its end.

        Raises EngineLost, or the error of the call.
        """
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        try:
            self._under_way = [self._group.broadcast([tensor], options) for tensor in tensors]
            self._until(lambda: call.done() and self._is_sent(), call, "receive the weights", timeout_s)
        except RuntimeError as error:
            raise EngineLost(f"the server must receive the weights within {timeout_s:g} s: {brief(error)}") from error
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
                raise EngineLost(f"the server must {what} within {timeout_s:g} s: it did not")
            time.sleep(PAUSE_S)
        call.result()
