"""Checks the invariants I1 to I12 (docs/invariants.md) of a run, from its journal alone.

Imports nothing of the head: docs/audit.md lists its rules. Begin with `audit.py`.
"""
