"""TRL counts optimizer steps and completions; here a step is an update: one generation of prompts, one version."""

import math
from collections.abc import Callable
from typing import Any

from areal_convert.mapping import Foreign, Ours
from areal_convert.values import number, whole

ASYNC = (
    "max_staleness",
    "weight_sync_steps",
    "max_inflight_tasks",
    "queue_maxsize",
    "token_budget",
    "fork_threshold_tokens",
)
SIZE, ACCUMULATED, PER_GENERATION = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"
GENERATED, PASSES, SYNC = "generation_batch_size", "num_iterations", "weight_sync_steps"


def is_async(foreign: Foreign) -> bool:
    """Whether it is an AsyncGRPOConfig."""
    return any(foreign.values.get(key) is not None for key in ASYNC)


def n_minibatches(foreign: Foreign) -> int:
    """Optimizer steps on one generation, or between two published versions."""
    if is_async(foreign):
        return max(1, whole(foreign.get(SYNC, 1)))
    accumulated = whole(foreign.get(ACCUMULATED))
    if foreign.get(GENERATED) is not None:
        forward_passes = whole(foreign.get(GENERATED)) // whole(foreign.get(SIZE))
    else:
        forward_passes = whole(foreign.get(PER_GENERATION, accumulated))
    return max(1, forward_passes // accumulated)


def n_steps(ours: str) -> Callable[[Any, Foreign], Ours]:
    """Optimizer steps as updates; at or below 0: not set. Between 0 and 1 they are a share of the run."""

    def read(value: Any, foreign: Foreign) -> Ours:
        steps = number(value)
        if 0 < steps < 1 and ours == "actor.lr_warmup_steps":
            foreign.warmup = ("warmup_steps", steps)
            return {}
        if 0 < steps < 1:
            steps *= max(0, whole(foreign.get("max_steps", -1)))
        if steps <= 0:
            return {}
        per_update = n_minibatches(foreign) * whole(foreign.get(PASSES, 1))
        if per_update > 1:
            foreign.notes[ours] = f"{steps:g} optimizer steps, {per_update} an update"
        return {ours: max(1, math.ceil(steps / per_update))}

    return read


def batch(ours: Ours, foreign: Foreign) -> None:
    """Completions of one process as prompts of one update."""
    n = n_minibatches(foreign)
    generated = None if is_async(foreign) else foreign.get(GENERATED)
    counted = (
        (GENERATED,) if generated is not None else (SIZE, ACCUMULATED, SYNC if is_async(foreign) else PER_GENERATION)
    )
    if generated is None:
        generated = whole(foreign.get(SIZE)) * passes(foreign, n)
        foreign.notes["data.batch_size"] = "of one process: multiply by their number"
    prompts = max(1, whole(generated) // whole(foreign.get("num_generations")))
    foreign.put(ours, {"data.batch_size": prompts}, *counted)
    of_step = (SYNC,) if is_async(foreign) else (PER_GENERATION, GENERATED, ACCUMULATED)
    foreign.put(ours, {"actor.ppo_n_minibatches": n}, *of_step)
    if foreign.get(GENERATED) is not None and not is_async(foreign):
        foreign.notes["actor.ppo_n_minibatches"] = "with one process: divide by their number"


def passes(foreign: Foreign, n: int) -> int:
    """Forward passes of a generation, each over per_device_train_batch_size completions."""
    if is_async(foreign):
        return n * whole(foreign.get(ACCUMULATED))
    return whole(foreign.get(PER_GENERATION, foreign.get(ACCUMULATED)))
