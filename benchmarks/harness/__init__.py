"""Shared parts of the benches: worker processes, interleaved rounds, the control, the protocol of a bench.

`worker_main.py` and `bare_import.py` also run in the peers' interpreter: standard library only.
"""
