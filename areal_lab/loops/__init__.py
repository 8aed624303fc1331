"""Training loops in one process: with a given lag, or in virtual time. Begin with `evaluated_loop.py`."""
