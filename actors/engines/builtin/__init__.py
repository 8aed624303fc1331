"""The built-in engine, with its KV caches and forward. Imports `cpu`, `models`, `areal_bus`. Begin with `engine.py`."""
