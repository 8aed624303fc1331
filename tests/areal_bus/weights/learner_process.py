"""Learner ranks that push: FSDP2 over two ranks while a side thread sends, or one rank that gives a push up.

`fsdp RANK WORLD_STORE`: for each {"begin": {...}} a snapshot, a push, steps beside it; the root answers what it sent.
`cancel [ROUTE]`: {"begin": {...}} starts a push, the next line cancels it, and the process ends.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from actors.runtime.process import leave
from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import join_store, serve_store
from areal_bus.weights.route import Route
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import Snapshot, digest_of, take_snapshot

BUCKET = 1 << 20


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def orders() -> Iterator[dict[str, object]]:
    for line in sys.stdin:
        yield json.loads(line)


def fsdp(rank: int, world: str) -> None:
    """Each push overlaps training steps on the default world; the snapshot's memory goes round."""
    dist.init_process_group("gloo", store=join_store(world, 60), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = store = previous = None
    if rank == 0:
        store, endpoint = serve_store("127.0.0.1")
        root = WeightSender(store, interface="lo", address="127.0.0.1")
        say({"store": endpoint})
    for order in orders():
        begin = PushBegin(**order["begin"])  # type: ignore[arg-type]
        parameters = dict(model.named_parameters())
        held = digest_of(parameters)
        snapshot = take_snapshot(begin.version, parameters, is_root=rank == 0, previous=previous, bucket_bytes=BUCKET)
        done: list[str] = []
        thread = threading.Thread(target=push, args=(root, snapshot, begin, done))
        thread.start()
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
        thread.join()
        if snapshot is not None:
            say({"sent": done[0], "digest": snapshot.digest, "held": held})
        previous = snapshot
    if root is not None:
        root.close()
    dist.destroy_process_group()


def push(root: WeightSender | None, snapshot: Snapshot | None, begin: PushBegin, done: list[str]) -> None:
    if root is not None and snapshot is not None:
        done.append(root.push(snapshot, begin).digest)


def cancel(route: Route = "gloo") -> None:
    store, endpoint = serve_store("127.0.0.1")
    root = WeightSender(store, interface="lo", address="127.0.0.1", route=route)
    say({"store": endpoint})
    requests = orders()
    begin = PushBegin(**next(requests)["begin"])  # type: ignore[arg-type]
    shared_on = torch.device("cpu") if route == "shared" else None
    snapshot = take_snapshot(begin.version, {"w": torch.randn(16 << 20)}, bucket_bytes=BUCKET, shared_on=shared_on)
    if snapshot is None:
        raise RuntimeError("the root takes a snapshot")
    thread = threading.Thread(target=fail, args=(root, snapshot, begin))
    thread.start()
    next(requests)
    root.cancel()
    thread.join()


def fail(root: WeightSender, snapshot: Snapshot, begin: PushBegin) -> None:
    began = time.monotonic()
    try:
        root.push(snapshot, begin)
    except PushFailed as error:
        say({"error": str(error), "seconds": time.monotonic() - began})


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "fsdp":
        fsdp(int(sys.argv[2]), sys.argv[3])
    else:
        cancel(*sys.argv[2:])  # type: ignore[arg-type]
    leave(0)
