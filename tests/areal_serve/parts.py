"""Small real parts of the server: a random character model in a folder, its trainer, data of a pass."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import Config
from areal_serve.trainer import Trainer
from areal_serve.wire import Datum, PassRequest

CONTEXT = 48
CONFIG = Config.model_validate(
    {
        "model": {"scratch": {"hidden_size": 32, "layers": 2, "heads": 2, "max_positions": CONTEXT}},
        "data": {"task": "sums"},
        "learner": {"max_tokens_per_mb": 24},  # several micro-batches
        "rollout": {"max_concurrent_rollouts": 8},
    }
)


@cache
def model_folder() -> Path:
    folder = Path(mkdtemp(prefix="serve-model-"))
    assert CONFIG.model.scratch is not None
    write_scratch_folder(folder, CONFIG.model.scratch)
    return folder


def trainer(config: Config = CONFIG) -> Trainer:
    return Trainer(config, str(model_folder()), device="cpu", max_tokens=CONTEXT)


def datum(rng: Any, n: int, *, targets: int = 0, **others: Any) -> Datum:
    """`n` random tokens with targets (`targets` a position, or one), weights and advantages, some of them 0."""
    shape = (n, targets) if targets else (n,)
    kept = rng.random(shape) < 0.7
    inputs = {
        "target_tokens": rng.integers(3, 20, shape),
        "weights": (rng.random(shape) * kept).astype(np.float32),
        "logprobs": (-3 + rng.random(shape)).astype(np.float32),
        "advantages": (rng.normal(size=shape) * kept).astype(np.float32),
        "sequence_ratio_mask": kept.astype(np.float32),
    }
    return Datum(rng.integers(3, 20, n), {**inputs, **others})


def data(*lengths: int, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [datum(rng, n) for n in lengths]


def request(loss_fn: str, given: list[Datum], *, forward_only: bool = False, **config: float) -> PassRequest:
    return PassRequest("m", 1, loss_fn, forward_only, dict(config), given)
