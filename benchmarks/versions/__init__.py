"""Sampling while weights change: the CPU time of each way."""
