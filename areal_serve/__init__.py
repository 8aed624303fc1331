"""A server of the Tinker API: a training loop as a client, models and samples in processes of ours (docs/tinker.md).

Imports actors, areal_bus, launch and tools; no module imports this package (the launcher finds `ranks.py`, the report
`report` by its name).
Begin with `front.py` (requests) and `registry.py` (what is accepted, in which order); `trainer.py` and `sampler.py` are
the processes that compute.
"""
