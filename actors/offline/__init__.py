"""Programs that run without a ring: evaluation, recomputed log-probs, the synchronous reference.

May import all of `actors`. Begin with `synchronous_reference.py`.
"""
