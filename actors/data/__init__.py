"""Rows of data: tasks, files, and their order. Imports `areal_bus` only; no torch. Begin with `loading.py`."""
