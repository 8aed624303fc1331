"""One update: forward passes, advantages, objective, backward pass and metrics. Begin with `ppo.py`."""
