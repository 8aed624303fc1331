"""A member of weight pushes in a process of its own: reads one JSON order a line, answers with one JSON line each.
`python -m tests.areal_bus.weights.member_process NAME [DEVICE]`.

An order is {"begin": {...PushBegin}, "expect": {...}, "signal_at": [bucket, signal], "reuse": bool, "swaps": bool,
"prints": bool, "shut": bool, "fan_out": int, "spoils": bool}: the answer tells what was received, or the error. It
"reuses" the tensors that it holds, as for an engine with its own copy, or "swaps": it receives into those before them.
"spoils": a bit of what it holds has flipped.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from actors.runtime.process import leave
from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import protocol, shared_memory
from areal_bus.weights.delta import BaseWeights
from areal_bus.weights.receiver import DeltaBuffers, ReceiveBuffers, WeightReceiver
from areal_bus.weights.snapshot import digest_of

OPENS = shared_memory._open_host
FAN_OUT = protocol.FAN_OUT


def fingerprint(tensor: torch.Tensor) -> list[object]:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return [list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]


def signal_at(bucket: int, number: int) -> None:
    """This process sends itself a signal when that bucket comes down (once)."""
    count = 0

    def counted(real: Callable[[Any, int, torch.Tensor], None]) -> Callable[[Any, int, torch.Tensor], None]:
        def write(self: object, start: int, piece: torch.Tensor) -> None:
            nonlocal count
            if count == bucket:
                os.kill(os.getpid(), number)
            count += 1
            real(self, start, piece)

        return write

    for landing in (ReceiveBuffers, DeltaBuffers):
        landing.write = counted(landing.write)  # type: ignore[method-assign]


def shut(handle: shared_memory.Handle) -> NoReturn:
    """As where this process must not look into others."""
    raise PermissionError(f"/proc/{handle['pid']}/fd")


def main(name: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    member = WeightReceiver(name, address="127.0.0.1", interface="lo", device=device)
    spare, older, base = None, None, None
    print(json.dumps({"up": name}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("signal_at"):
            signal_at(*order["signal_at"])
        shared_memory._open_host = shut if order.get("shut") else OPENS
        protocol.FAN_OUT = order.get("fan_out", FAN_OUT)
        began = time.monotonic()
        try:
            if order.get("spoils") and spare is not None:
                next(iter(spare.values())).view(-1).view(torch.uint8)[8] ^= 1
            into = spare if order.get("reuse") else older if order.get("swaps") else None
            received = member.receive(PushBegin(**order["begin"]), into, expect=order.get("expect"), base=base)
        except PushFailed as error:
            answer = {"error": str(error), "seconds": time.monotonic() - began}
            if base is not None:
                answer["base"] = digest_of(dict(base.tensors)) == base.digest
        else:
            tensors = received.tensors
            answer = {
                "digest": received.digest,
                "held": digest_of(tensors),
                "seconds": received.receive_s,
                "sent_bytes": received.sent_bytes,
                "delta_from": received.delta_from,
                "tensors": {key: fingerprint(tensor) for key, tensor in tensors.items()} if order.get("prints") else {},
                "reused": spare is not None and all(tensors[k] is spare.get(k) for k in tensors),
            }
            spare, older = tensors, None if order.get("reuse") else spare
            base = BaseWeights(order["begin"]["version"], received.digest, tensors)
        print(json.dumps(answer), flush=True)
    member.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
