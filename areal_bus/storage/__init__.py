"""Atomic storage: versioned folders and the checkpoints of the head.

Imports `core`, `wire`, `messages` and `errors`. Begin with `versioned_dirs.py`.
"""
