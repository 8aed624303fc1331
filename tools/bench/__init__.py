"""Benches: one folder a bench or a family, its sides beside it; `harness` has what they share.

Imports `areal_bus` and `tools`; a side imports what it measures, in a process of its own. Begin with `__main__.py`.
"""
