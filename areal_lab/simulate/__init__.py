"""The planner: predicts the throughput of a ring in virtual time, for a split and an eta.

Imports `areal_bus`. Begin with `ring.py`.
"""
