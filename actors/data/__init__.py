"""Rows of data: tasks, files, and the order in which they are drawn.

Imports `areal_bus` only; no torch. Begin with `loading.py`.
"""
