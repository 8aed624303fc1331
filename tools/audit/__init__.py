"""A run checked by its journal alone: I1 to I12 of docs/invariants.md.

Imports nothing of the head: the rules are written a second time from docs/journal.md. Begin with `audit.py`.
"""
