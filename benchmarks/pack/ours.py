"""Our side of the bench `pack`."""

from typing import Any

from actors.learner.batching import pack
from areal_bus.core.transitions.batcher import split
from benchmarks.harness.worker_main import seconds, serve


def micro_batches(lengths: list[int], capacity: int) -> dict[str, Any]:
    return {"seconds": seconds(lambda: pack(lengths, capacity=capacity)), "parts": pack(lengths, capacity=capacity)}


def shares(lengths: list[int], n_ranks: int) -> dict[str, Any]:
    return {"seconds": seconds(lambda: split(lengths, n_ranks)), "parts": split(lengths, n_ranks)}


if __name__ == "__main__":
    serve({"micro_batches": micro_batches, "shares": shares})
