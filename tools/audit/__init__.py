"""Checks the invariants I1 to I12 (docs/invariants.md) of a run, from its journal alone.

Imports nothing of the head: the rules are written a second time from docs/journal.md. Begin with `audit.py`.
"""
