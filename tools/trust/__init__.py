"""Proofs about a config or a run: equal to the plain loop (`prove`), trained again from recorded batches (`replay`).

May import `tools` and `areal_bus`; programs of `actors` run in subprocesses. Begin with `prove.py`.
"""
