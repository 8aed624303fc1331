"""The front's links to its workers, wherever they run: as children of the front, or in other ranks of an mpirun job.

Imports areal_bus and areal_serve.worker. Begin with `worker_link.py`.
"""
