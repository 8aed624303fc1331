"""Atomic storage: versioned folders, the checkpoints of the head, and the journal.

Imports `core`, `wire`, `messages` and `errors`. Begin with `versioned_dirs.py`.
"""
