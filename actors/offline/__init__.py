"""Programs without a ring: evaluation, log-probs, the reference. Begin with `synchronous_reference.py`."""
