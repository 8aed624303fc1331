"""Runs a job under random faults and measures what they cost: ETTR, undone updates, losses, recovery times.

Imports `areal_bus`, `tools` and the start of a ring from `areal_lab.sweep`. Begin with `chaos_run.py`; docs/faults.md.
"""
