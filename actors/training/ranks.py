"""The learner ranks as one: sums over them and the default process group FSDP2 uses; knows nothing of models.

A single learner has no process group at all.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place among the learners. Every method is a collective: all ranks call it in the same order."""

    index: int = 0
    size: int = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Return when all ranks are here."""
        self.sum([0.0])

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        result: list[float] = tensor.tolist()
        return result


def meet(store: Store, *, index: int, size: int, interface: str, device: str, timeout_s: float) -> Ranks:
    """Build the default process group over `store`, on the named interface; all ranks call it.

    Collectives are gloo on CPU tensors and NCCL on CUDA ones; neither is encrypted.
    """
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
    return Ranks(index=index, size=size)


def lost_peer(error: BaseException) -> bool:
    """Whether a collective broke, which it does when another rank ends. gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def part() -> None:
    """End the default process group, if there is one.

    NCCL's is left to the end of the process: taking it apart waits for peers, and one that died never comes.
    """
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
