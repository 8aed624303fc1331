"""Programs outside a ring: evaluation, log-probs recomputed, the synchronous reference.

May import all of `actors`. Begin with `synchronous_reference.py`.
"""
