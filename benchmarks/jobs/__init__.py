"""Benches of whole jobs under mpirun, and their shared parts.

Imports `harness`, `tools` and `areal_bus`. Begin with `real_job.py`.
"""
