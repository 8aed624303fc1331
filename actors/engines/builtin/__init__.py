"""The built-in engine: batches, KV caches, sampling and the Llama forward.

Imports `cpu`, `models` and `areal_bus`. Begin with `engine.py`.
"""
