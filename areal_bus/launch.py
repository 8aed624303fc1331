"""Entry points: `python -m areal_bus.launch CONFIG.toml` and the script `areal-bus`: the only upward import."""

import importlib
import signal
import sys

from areal_bus.process import isolation, parent_death, standard_streams


def main() -> int:
    parent_death.die_with_starter()  # must be the first call
    standard_streams.restart_in_utf8_mode()
    standard_streams.secure()
    # a drain request (SIGUSR1) stays pending until it is handled; SIGUSR2 is for learners and generators only
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    if wrong := isolation.isolate():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    attendant = importlib.import_module("launch.fork.attendant")  # imports the standard library only
    if attendant.is_wanted(sys.argv[1:]):
        return int(attendant.main())
    importlib.import_module("launch.run.process").note_terminal()
    return int(importlib.import_module("launch.commands.main").main())


def main_of_console() -> int:
    standard_streams.restart_in_utf8_mode()
    standard_streams.open_missing()
    if wrong := isolation.isolate():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    return int(importlib.import_module("launch.commands.cli").main())


if __name__ == "__main__":
    sys.exit(main())
