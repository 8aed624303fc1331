"""Benches of whole jobs under mpirun, and what they have in common.

Imports `harness`, `tools` and `areal_bus`. Begin with `real_job.py`.
"""
