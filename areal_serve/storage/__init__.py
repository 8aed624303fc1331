"""What a server keeps on disk for its users: checkpoints, their downloads, the journal of its clients.

Imports areal_bus and areal_serve. Begin with `checkpoints.py`.
"""
