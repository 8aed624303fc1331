"""The actors: one folder a role, then what roles share.

Imports `areal_bus`. Begin with `runtime/start.py`, then `head/shell.py`, `generator/loop.py`, `rewards/actor.py` and
`learner/loop.py`.
"""
