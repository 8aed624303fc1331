"""The member's side of the bench `delta`: live and spare tensors change places at each push, as in a generator."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from actors.runtime.process import leave
from areal_bus.messages import PushBegin
from areal_bus.weights.delta import BaseWeights
from areal_bus.weights.receiver import WeightReceiver
from benchmarks.harness.worker_main import serve

opened: list["Member"] = []  # one a process


class Member:
    """A generator without an engine."""

    def __init__(self, name: str, address: str) -> None:
        self._receiver = WeightReceiver(name, address=address, interface="")
        self._live: BaseWeights | None = None
        self._spare: Mapping[str, Tensor] | None = None

    def receive(self, begin: Mapping[str, Any]) -> dict[str, Any]:
        """Take part in one push. Returns the digest, bytes received, CPU seconds, and the version of the base."""
        cpu = time.process_time()
        received = self._receiver.receive(PushBegin(**begin), self._spare, base=self._live)
        self._spare = None if self._live is None else self._live.tensors
        self._live = BaseWeights(begin["version"], received.digest, received.tensors)
        return {
            "digest": received.digest,
            "bytes": received.sent_bytes,
            "delta_from": received.delta_from,
            "cpu_s": time.process_time() - cpu,
        }


def open_member(name: str, address: str) -> None:
    opened[:] = [Member(name, address)]


def receive(begin: dict[str, Any]) -> dict[str, Any]:
    return opened[0].receive(begin)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"open": open_member, "receive": receive}
torch.set_num_threads(1)

if __name__ == "__main__":
    serve(FUNCTIONS)
    leave(0)
