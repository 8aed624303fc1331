"""The learner actor: trains batches, publishes versions. Begin with `actor.py`, then `update/ppo.py`."""
