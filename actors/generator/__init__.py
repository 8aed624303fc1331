"""The generator actor: runs episodes on an engine, delivers trajectories, receives weights.

Imports `engines`, `workflows`, `models`, `runtime` and `areal_bus`. Begin with `loop.py`.
"""
