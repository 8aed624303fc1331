"""AReaL's side of the bench `pack`: first-fit-decreasing micro-batches and Karmarkar-Karp balancing."""

import importlib
from typing import Any

from benchmarks.harness.bare_import import bare
from benchmarks.harness.worker_main import seconds, serve

bare("areal", "areal.utils")
seqpack: Any = importlib.import_module("areal.utils.seqpack")


def micro_batches(lengths: list[int], capacity: int) -> dict[str, Any]:
    parts: list[list[int]] = []

    def work() -> None:
        parts[:] = seqpack.ffd_allocate(lengths, capacity, 1)

    return {"seconds": seconds(work), "parts": [[int(index) for index in part] for part in parts]}


def shares(lengths: list[int], n_ranks: int) -> dict[str, Any]:
    parts: list[list[int]] = []

    def work() -> None:
        parts[:] = seqpack.kk_allocate(lengths, sum(lengths), n_ranks)

    return {"seconds": seconds(work, 0.0, at_least=1), "parts": parts}


if __name__ == "__main__":
    serve({"micro_batches": micro_batches, "shares": shares})
