"""What benches share: worker processes, interleaved rounds, the control, the protocol of a bench.

`worker_main.py` and `bare_import.py` run in the peers' interpreter, too: standard library only.
"""
