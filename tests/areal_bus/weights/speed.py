"""How long a push of a model of SmolLM2-135M takes here: `python -m tests.areal_bus.weights.speed MEMBERS BUCKET_MIB
ROUTE`.

Prints one JSON object; medians over the pushes after the first, which also builds the group and fresh memory.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from areal_bus.messages import PushBegin
from areal_bus.weights.checksum import checksum
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.route import Route
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from tests.areal_bus.weights.peer_process import Peer

N_PUSHES = 6


def model() -> dict[str, torch.Tensor]:
    """fp32 tensors in the shapes of SmolLM2-135M (embeddings tied): 538 MB."""
    wide, narrow, hidden = 576, 192, 1536
    layer = {"q": (wide, wide), "k": (narrow, wide), "v": (narrow, wide), "o": (wide, wide)}
    layer |= {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)}
    parameters = {"embedding": torch.randn(49152, wide), "norm": torch.randn(wide)}
    for index in range(30):
        parameters |= {f"{index}.{name}": torch.randn(shape) for name, shape in layer.items()}
        parameters |= {f"{index}.{name}": torch.randn(wide) for name in ("input_norm", "post_norm")}
    return parameters


def main(n_members: int = 2, bucket_mib: int = 64, route: Route = "gloo") -> None:
    torch.set_num_threads(1)
    parameters = model()
    store, endpoint = serve_store("127.0.0.1")
    root = WeightSender(store, interface="lo", address="127.0.0.1", route=route)
    shared_on = torch.device("cpu") if route == "shared" else None
    peers = [
        Peer(f"generator-{i}.0", "tests.areal_bus.weights.member_process", f"generator-{i}.0") for i in range(n_members)
    ]
    names = [peer.name for peer in peers]
    for peer in peers:
        peer.answer()
    snapshot: Snapshot | None = None
    pushes, snapshots = [], []
    for push in range(N_PUSHES):
        began = time.perf_counter()
        snapshot = take_snapshot(
            push, parameters, previous=snapshot, bucket_bytes=bucket_mib << 20, shared_on=shared_on
        )
        snapshots.append(time.perf_counter() - began)
        if snapshot is None:
            raise RuntimeError("the root takes a snapshot")
        begin = PushBegin(push=push, version=push, view=0, members=names, store=endpoint, timeout_s=120.0)
        for peer in peers:
            peer.order(begin, prints=False, reuse=True)
        pushes.append(root.push(snapshot, begin).receive_s)
        if {peer.answer()["held"] for peer in peers} != {snapshot.digest}:
            raise RuntimeError("a member holds something else")
    root.close()
    for peer in peers:
        peer.end()
    if snapshot is None:
        raise RuntimeError("no push was made")
    copy = torch.empty_like(snapshot.data)
    figures = {
        "route": route,
        "members": n_members,
        "bucket_mib": bucket_mib,
        "mb": round(snapshot.n_bytes / 1e6),
        "first_push_s": round(pushes[0], 3),
        "push_s": round(statistics.median(pushes[1:]), 3),
        "memcpy_s": round(median_of(lambda: copy.copy_(snapshot.data)), 3),
        "checksum_s": round(median_of(lambda: checksum(snapshot.data)), 3),
        "first_snapshot_s": round(snapshots[0], 3),
        "snapshot_s": round(statistics.median(snapshots[1:]), 3),
    }
    print(json.dumps(figures))


def median_of(act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])  # type: ignore[arg-type]
