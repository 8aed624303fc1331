"""From the command line to processes: `plan/`, `memory/`, `run/`, `commands/`, `fork/`. See `commands/main.py`."""
