"""Entry point: `mpirun -np 4 python -m areal_bus.launch CONFIG.toml`. Imports `launch`, the only upward import."""

import importlib
import signal
import sys
from pathlib import Path

from areal_bus import parent_death

ROOT = Path(__file__).resolve().parents[1]


def shadowed_packages() -> list[str]:
    """An error line for each of our packages that Python finds in another place."""
    found = []
    for name in ("actors", "launch", "tools"):
        path = Path(importlib.import_module(name).__file__ or ".").resolve().parent
        if path != ROOT / name:
            found.append(
                f"error: package {name!r} must be {ROOT / name}: Python finds {path}; remove it from PYTHONPATH"
            )
    return found


def main() -> int:
    parent_death.die_with_starter()  # must be the first call
    # a drain request (SIGUSR1) stays pending until it is handled; SIGUSR2 is for learners and generators only
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    if wrong := shadowed_packages():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    importlib.import_module("launch.process").note_terminal()
    return int(importlib.import_module("launch.main").main())


if __name__ == "__main__":
    sys.exit(main())
