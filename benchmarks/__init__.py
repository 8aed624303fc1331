"""Benchmarks: one folder a bench (or a family) with its sides; `harness` holds the shared parts.

Imports `areal_bus` and `tools`; each side imports what it measures, in its own process. Begin with `__main__.py`.
"""
