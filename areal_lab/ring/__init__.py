"""A ring without a model: engine and update by laws of length, speed and time. Begin with `engine.py`.

Generators and learners find `connect.py` and `update.py` by name (rollout.engine = "simulated", [learner.simulated]).
"""
