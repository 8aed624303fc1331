"""The learner actor: batches, losses, updates, checkpoints and the sending side of the weight push.

Imports `cpu`, `models`, `data`, `workflows`, `runtime` and `areal_bus`. Begin with `loop.py` and `ppo.py`.
"""
