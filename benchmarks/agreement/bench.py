"""Bench `agreement`: our parts of algorithms beside the functions of verl, AReaL and TRL."""

import time
from contextlib import ExitStack

from areal_bus.errors import ConfigError
from benchmarks.harness import pace, worker_process
from benchmarks.harness.protocol import Figures

SEEDS = 20

Values = dict[str, list[float]]


class Agreement:
    about = (
        "our advantages, losses, corrections and aggregations beside those of verl, AReaL and TRL: largest difference"
    )

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the peers."""
        errors: dict[str, float] = {}
        with ExitStack() as stack:
            mine = stack.enter_context(worker_process.ours("agreement.ours"))
            theirs = stack.enter_context(worker_process.peer("agreement.peers"))
            n_seeds, began = pace.of(SEEDS, 4), time.monotonic()
            for seed in range(n_seeds):
                pace.say(seed + 1, n_seeds, "batch", time.monotonic() - began)
                for name, error in differences(mine.ask("compute", seed=seed), theirs.ask("compute", seed=seed)):
                    errors[name] = max(errors.get(name, 0.0), error)
        return {
            "bench": "agreement",
            "seeds": n_seeds,
            "n_functions": len(errors),
            "max_error": {name: float(f"{error:.2g}") for name, error in sorted(errors.items())},
            "largest_error": max(errors.values()),
        }


def differences(ours: Values, theirs: dict[str, Values]) -> list[tuple[str, float]]:
    """("FUNCTION (PEER)", largest distance relative to the largest value) of each function. Raises ConfigError when one
    side lacks a function.
    """
    if set(ours) != set(theirs):
        raise ConfigError(f"both sides compute the same functions: {sorted(set(ours) ^ set(theirs))} are on one side")
    found = []
    for name, sides in theirs.items():
        for peer, values in sides.items():
            scale = max(map(abs, values))
            apart = max(abs(a - b) for a, b in zip(ours[name], values, strict=True))
            found.append((f"{name} ({peer})", apart / scale))
    return found
