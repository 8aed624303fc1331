"""A member of weight pushes in a process of its own: reads one JSON order a line, answers with one JSON line each.
`python -m tests.areal_bus.weights.member_process NAME [DEVICE]`.

An order is {"begin": {...PushBegin}, "expect": {...}, "signal_at": [bucket, signal], "reuse": bool, "prints": bool,
"shut": bool, "fan_out": int}: the answer tells what was received, or the error.
"""

import hashlib
import json
import os
import sys
import time
from typing import NoReturn

import torch

from actors.runtime.process import leave
from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import broadcast_tree, shared_memory
from areal_bus.weights.receive_buffers import ReceiveBuffers
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.snapshot import digest_of

OPENS = shared_memory._open_host
FAN_OUT = broadcast_tree.FAN_OUT


def fingerprint(tensor: torch.Tensor) -> list[object]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]


def signal_at(bucket: int, number: int) -> None:
    """This process sends itself a signal when that bucket comes down (once)."""
    real = ReceiveBuffers.write
    count = 0

    def write(self: ReceiveBuffers, start: int, piece: torch.Tensor) -> None:
        nonlocal count
        if count == bucket:
            os.kill(os.getpid(), number)
        count += 1
        real(self, start, piece)

    ReceiveBuffers.write = write  # type: ignore[method-assign, assignment]


def shut(handle: shared_memory.Handle) -> NoReturn:
    """As where this process must not look into others."""
    raise PermissionError(f"/proc/{handle['pid']}/fd")


def main(name: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    member = WeightReceiver(name, address="127.0.0.1", interface="lo", device=device)
    spare = None
    print(json.dumps({"up": name}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("signal_at"):
            signal_at(*order["signal_at"])
        shared_memory._open_host = shut if order.get("shut") else OPENS
        broadcast_tree.FAN_OUT = order.get("fan_out", FAN_OUT)
        began = time.monotonic()
        try:
            tensors, digest, seconds = member.receive(
                PushBegin(**order["begin"]), spare if order.get("reuse") else None, expect=order.get("expect")
            )
        except PushFailed as error:
            answer = {"error": str(error), "seconds": time.monotonic() - began}
        else:
            answer = {
                "digest": digest,
                "held": digest_of(tensors),
                "seconds": seconds,
                "tensors": {key: fingerprint(tensor) for key, tensor in tensors.items()} if order.get("prints") else {},
                "reused": spare is not None and all(tensors[k] is spare.get(k) for k in tensors),
            }
            spare = tensors
        print(json.dumps(answer), flush=True)
    member.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
