"""Which row is issued next: row order, curriculum, mixture of sources, and the cursor that saves its position.

Imports nothing of the core. Begin with `data_source.py`.
"""
