"""The reward actor: scores trajectories in worker processes, and the built-in reward functions.

Imports `runtime` and `areal_bus`; no torch. Begin with `actor.py`; `protocol.py` defines a reward function.
"""
