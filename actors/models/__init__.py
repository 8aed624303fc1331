"""Model folders: loading, scratch, packed sequences, attention. Imports `areal_bus` only. Begin with `loading.py`."""
