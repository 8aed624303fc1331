"""The parts of an algorithm: advantage estimators, losses, corrections and aggregations. Pure functions of tensors.

`parts.py` has what each part receives and returns; docs/algorithms.md lists the parts and which ones go together.
"""
