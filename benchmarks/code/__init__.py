"""Bench `code`: throughput of the reward `code`. `bench.py` is the entry; `ours.py` runs in a process of its own."""
