"""Entry: `mpirun -np 4 python -m areal_bus.launch CONFIG.toml`. The one import of this package that points up."""

import importlib
import signal
import sys
from pathlib import Path

from areal_bus import parent_death

ROOT = Path(__file__).resolve().parents[1]


def strangers() -> list[str]:
    """A line for each of our common names that is found somewhere else than beside this package."""
    found = []
    for name in ("actors", "launch", "tools"):
        path = Path(importlib.import_module(name).__file__ or ".").resolve().parent
        if path != ROOT / name:
            found.append(
                f"error: package {name!r} must be {ROOT / name}: Python finds {path}; remove it from PYTHONPATH"
            )
    return found


def main() -> int:
    parent_death.die_with_starter()  # first of all
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a request to drain waits until somebody listens
    if wrong := strangers():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    return int(importlib.import_module("launch.main").main())


if __name__ == "__main__":
    sys.exit(main())
