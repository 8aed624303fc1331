"""The weight push: learner rank 0 sends, generators receive and verify every byte.

The one folder of this package that imports torch. Imports `native`, `config`, `process`, `messages` and `errors`.
Begin with `sender.py` and `receiver.py`; docs/weights.md has the protocol.
"""
