"""The staleness rules under simulated rings: many seeds, the events of one seed, a table of policies.

Imports `areal_bus` and `simulator`. Begin with `soak.py`.
"""
