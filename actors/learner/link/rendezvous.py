"""Learner ranks meet at the store of rank 0 and reduce values over all ranks.

A rank may die and restart until rank 0 has met all of them. From then on they depend on each other.
  copies/K the versions that rank K has a copy of in memory
  here/K   the name of rank K, set as soon as it has found the store
  begun    rank 0's word: whom it met, and what they begin with. Who is not named waits for rank 0's next life

A single learner has no process group at all.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from actors.learner.link.inbox import LearnerInbox
from areal_bus.errors import PushFailed
from areal_bus.messages import PeerList
from areal_bus.weights.process_group import join_store

POLL_S = 0.05
RETRY_S = 1.0
CONNECT_S = 10.0
BEGUN = "begun"


@dataclass(frozen=True, slots=True)
class RankHost:
    """An incarnation of rank 0 and the address of its store."""

    name: str
    endpoint: str


class Rendezvous:
    """How one rank meets the others. A Rejoin in the meantime calls `join_again`: nothing is lost yet."""

    def __init__(
        self, inbox: LearnerInbox, *, name: str, join_again: Callable[[], None], look: Callable[[], None]
    ) -> None:
        """`look` runs at every poll."""
        self._inbox = inbox
        self._name = name
        self._join_again = join_again
        self._look = look
        self._host: RankHost | None = None  # rank 0 by the latest PeerList

    def host(self, endpoint: str, choose: Callable[[list[list[int]]], Mapping[str, Any]], *, size: int) -> Store:
        """Rank 0: wait for all others at its store and publish what `choose` returns for the versions of their copies.

        Raises as `LearnerInbox.check`.
        """
        store = join_store(endpoint, CONNECT_S)
        ours = PrefixStore("meeting", store)
        keys = [_here(index) for index in range(1, size)]
        while not ours.check(keys):
            self._pause(POLL_S)
        names = [ours.get(key).decode() for key in keys]
        copies: list[list[int]] = [json.loads(ours.get(f"copies/{index}")) for index in range(1, size)]
        self._inbox.bind()
        ours.set(BEGUN, json.dumps({"names": names, "word": dict(choose(copies))}))
        return store

    def visit(self, index: int, copies: Sequence[int] = ()) -> tuple[Store, dict[str, Any]]:
        """Any other rank: find the store of rank 0 and read the word. Raises as `host`."""
        closed: RankHost | None = None  # began without this rank
        while True:
            self._listen()
            host = self._host
            if host is not None and host != closed:
                try:
                    store = join_store(host.endpoint, CONNECT_S)
                    begun = self._wait_at(store, host, index, copies)
                except (PushFailed, RuntimeError):  # that incarnation is gone or not reachable yet
                    self._pause(RETRY_S)
                    continue
                if begun is not None and self._name in begun["names"]:
                    self._inbox.bind()
                    return store, begun["word"]
                closed = host
            self._pause(POLL_S)

    def _wait_at(self, store: Store, host: RankHost, index: int, copies: Sequence[int]) -> dict[str, Any] | None:
        """Register at the store and wait for the word; None if rank 0 restarted meanwhile."""
        ours = PrefixStore("meeting", store)
        if not ours.check([BEGUN]):
            ours.set(f"copies/{index}", json.dumps(list(copies)))
            ours.set(_here(index), self._name)
        while not ours.check([BEGUN]):
            self._pause(POLL_S)
            self._listen()
            if self._host != host:
                return None
        begun: dict[str, Any] = json.loads(ours.get(BEGUN))
        return begun

    def _listen(self) -> None:
        while (message := self._inbox.take_now()) is not None:
            if isinstance(message, PeerList):
                for name, endpoint in zip(message.names, message.endpoints, strict=True):
                    if name.startswith("learner-0."):
                        self._host = RankHost(name, endpoint)

    def _pause(self, timeout_s: float) -> None:
        self._inbox.check()
        if self._inbox.asked_to_rejoin():
            self._join_again()
        self._look()
        self._inbox.wait(timeout_s)


def _here(index: int) -> str:
    return f"here/{index}"


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The learner ranks, next to each other, that share each packed row (actor.context_parallel)."""

    index: int  # of this rank within it
    size: int
    handle: Any  # torch.distributed.ProcessGroup


@dataclass(frozen=True, slots=True)
class LearnerRanks:
    """Index of this rank and reductions over all ranks. Every method is a collective, called in the same order."""

    index: int = 0
    size: int = 1
    replicas: int = 1  # copies of a sharded model
    context: ContextGroup | None = None  # None: each rank has rows of its own
    store: Store | None = field(default=None, repr=False, compare=False)  # of rank 0; None for a single rank

    @property
    def share(self) -> int:
        """Which share of a batch this rank trains: that of its context group."""
        return self.index // (self.context.size if self.context else 1)

    @property
    def n_shares(self) -> int:
        return self.size // (self.context.size if self.context else 1)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum of each value over the shares of a batch, in float64: of a context group the first rank counts."""
        counts = self.context is None or self.context.index == 0
        return self._reduce(values if counts else [0.0] * len(values), dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        self.sum([0.0])

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        result: list[float] = tensor.tolist()
        return result


def meet(
    store: Store,
    *,
    index: int,
    size: int,
    interface: str,
    device: str,
    timeout_s: float,
    replicas: int = 1,
    context_parallel: int = 1,
) -> LearnerRanks:
    """Build the default process group over `store`, on the named interface: gloo (CPU), NCCL (CUDA); not encrypted."""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=PrefixStore("learners", store),
        rank=index,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    context = _join_context(index, size, context_parallel, timeout_s) if context_parallel > 1 else None
    return LearnerRanks(index=index, size=size, replicas=replicas, context=context, store=store)


def _join_context(index: int, size: int, width: int, timeout_s: float) -> ContextGroup:
    """Build the context groups, `width` ranks in a row each; all ranks build all of them. Returns that of this rank."""
    groups = [
        dist.new_group(list(range(first, first + width)), timeout=timedelta(seconds=timeout_s))
        for first in range(0, size, width)
    ]
    return ContextGroup(index % width, width, groups[index // width])


def lost_peer(error: BaseException) -> bool:
    """Whether a collective, or rank 0's store, broke because another rank ended: by the error or its cause."""
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error)):
        return True
    return error.__cause__ is not None and lost_peer(error.__cause__)


def part() -> None:
    """End the default process group, if any. NCCL's is left to the process's end: it would wait for dead peers."""
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
