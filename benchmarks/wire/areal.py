"""AReaL's side of the bench `wire`: a trajectory of its workflows through its serialization, tensors to tensors."""

import importlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.bare_import import bare
from benchmarks.harness.worker_main import seconds, serve

bare("areal", "areal.infra", "areal.infra.rpc", "areal.utils")
encoding: Any = importlib.import_module("areal.infra.rpc.serialization")
orjson: Any = importlib.import_module("orjson")


def trajectory(n_prompt: int, n_sampled: int, seed: int) -> dict[str, Tensor]:
    """A trajectory as its single-turn workflow builds it."""
    dice = torch.Generator().manual_seed(seed)
    n = n_prompt + n_sampled
    ids = torch.randint(0, 150_000, (n,), dtype=torch.int32, generator=dice)
    given, sampled = torch.zeros(n_prompt), -torch.rand(n_sampled, generator=dice)
    mask = torch.cat([torch.zeros(n_prompt), torch.ones(n_sampled)]).to(torch.int32)
    halves = [-1] * n_prompt + [7] * (n_sampled // 2) + [8] * (n_sampled - n_sampled // 2)
    rows = {
        "input_ids": ids,
        "loss_mask": mask,
        "logprobs": torch.cat([given, sampled]),
        "versions": torch.tensor(halves, dtype=torch.int32),
        "attention_mask": torch.ones(n, dtype=torch.bool),
        "rewards": torch.tensor(1.0),
    }
    return {name: row.unsqueeze(0) for name, row in rows.items()}


def roundtrip(n_prompt: int, n_sampled: int, seed: int) -> dict[str, float]:
    sent = trajectory(n_prompt, n_sampled, seed)
    size = [0]
    got: dict[str, Tensor] = {}

    def work() -> None:
        body = orjson.dumps(encoding.serialize_value(sent))
        got.update(encoding.deserialize_value(orjson.loads(body)))
        size[0] = len(body)

    took = seconds(work)
    if not all(torch.equal(sent[name], got[name]) for name in sent):
        raise ValueError("the decoded trajectory must equal the encoded one")
    return {"seconds": took, "bytes": size[0]}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"roundtrip": roundtrip})
