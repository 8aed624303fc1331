"""Parts of every actor process: its start, context, session with the head, exit codes.

Imports `areal_bus` only; no torch. Begin with `start.py`.
"""
