"""From the command line to processes: ranks, resources, supervision, resume.

Imports `actors` and `areal_bus`. Begin with `main.py`, then `rank.py` and `supervise.py`.
"""
