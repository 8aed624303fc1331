"""Programs that sample, score or train without a ring: evaluation, log-probs, replay, the synchronous reference.

Of `tools` only this folder imports `actors` and torch. Begin with `synchronous_reference.py`.
"""
