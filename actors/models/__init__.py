"""Model folders: loading, scratch models, packed sequences and attention.

Imports `areal_bus` only. Begin with `loading.py`.
"""
