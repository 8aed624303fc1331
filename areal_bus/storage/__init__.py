"""Files that are written whole or not at all: versioned folders and the head's checkpoints.

Imports `core`, `wire`, `messages` and `errors`. Begin with `versioned_dirs.py`.
"""
