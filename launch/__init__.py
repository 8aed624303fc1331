"""From the command line to processes. Floors: `plan/`, `memory/`, `run/`, then `commands/` and `fork/`.

Begin with `commands/main.py`, then `run/rank.py`.
"""
