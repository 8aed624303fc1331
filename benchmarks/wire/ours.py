"""Our side of the bench `wire`: a trajectory from tensors to frames and back."""

import torch
from torch import Tensor

from areal_bus.messages import Finish, Trajectory
from areal_bus.wire.codec import decode, encode
from benchmarks.harness.worker_main import seconds, serve

JOB = "bench-wire"
PASSES = 50  # trajectories a timing, because reading the clock is not free


def trajectory(ids: Tensor, logps: Tensor) -> Trajectory:
    n = len(logps)
    return Trajectory(
        uid=12345, sample=3, attempt=0, evaluation="", generator="generator-3.1", finish=Finish.STOP,
        segments=[[len(ids) - n, n]], spans=[[7, n // 2], [8, n - n // 2]], seconds=3.25, term=0,
        ids=ids.numpy().tobytes(), logps=logps.numpy().tobytes(), prompt_text="", text="", row="{}",
    )  # fmt: skip


def there_and_back(ids: Tensor, logps: Tensor) -> tuple[Tensor, Tensor, int]:
    """Its ids and log-probs as they arrive, and the bytes that travelled."""
    frames = encode(trajectory(ids, logps), job=JOB)
    message = decode(frames, job=JOB)
    if not isinstance(message, Trajectory):
        raise TypeError("what was encoded as a trajectory must come back as one")
    got_ids = torch.frombuffer(bytearray(message.ids), dtype=torch.int32)
    got_logps = torch.frombuffer(bytearray(message.logps), dtype=torch.float32)
    return got_ids, got_logps, sum(map(len, frames))


def roundtrip(n_prompt: int, n_sampled: int, seed: int) -> dict[str, float]:
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 150_000, (n_prompt + n_sampled,), dtype=torch.int32, generator=dice)
    logps = -torch.rand(n_sampled, generator=dice)
    got_ids, got_logps, n_bytes = there_and_back(ids, logps)
    if not (torch.equal(ids, got_ids) and torch.equal(logps, got_logps)):
        raise ValueError("what arrives must be what was sent")
    took = seconds(lambda: [there_and_back(ids, logps) for _ in range(PASSES)]) / PASSES
    return {"seconds": took, "bytes": n_bytes}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"roundtrip": roundtrip})
