"""Inference engines behind one protocol.

`protocol.py` imports nothing of the engines. Begin there; docs/engines.md has the rules that all engines keep.
"""
