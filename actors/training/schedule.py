"""The course of the learning rate over training steps; pure."""

import math

from areal_bus.config import ActorConfig


def learning_rate(actor: ActorConfig, *, step: int, total: int) -> float:
    """Rate of training step `step` (0, 1, ...) of `total`: linear warm-up, then constant, or down to 0 at `total`."""
    if step < actor.lr_warmup_steps:
        return actor.lr * (step + 1) / actor.lr_warmup_steps
    after = max(total - actor.lr_warmup_steps, 1)
    done = min((step - actor.lr_warmup_steps) / after, 1.0)
    if actor.lr_schedule == "linear":
        return actor.lr * (1 - done)
    if actor.lr_schedule == "cosine":
        return actor.lr * 0.5 * (1 + math.cos(math.pi * done))
    return actor.lr
