"""Versioned folders, head checkpoints, journal. Imports `core`, `wire`, `messages`. Begin with `versioned_dirs.py`."""
