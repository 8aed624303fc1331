"""Inference engines behind one protocol, which imports none of them. Begin with `protocol.py` and docs/engines.md."""
