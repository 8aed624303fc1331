"""A rank of a job: checks before the start, run folders, rendezvous, supervision and restarts. Begin with `rank.py`."""
