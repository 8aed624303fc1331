"""The learner actor: consumes batches, trains, publishes versions.

Floors: `batching.py`, `link/` (messages, ranks), `model/`, `update/`, `checkpoint/`; `algorithms/` are pure functions.
Begin with `actor.py`, then `update/ppo.py`.
"""
