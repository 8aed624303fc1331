"""The staleness rules under simulated rings: many seeds, the story of one, a table of policies.

Imports `areal_bus` and `simulator`. Begin with `soak.py`.
"""
