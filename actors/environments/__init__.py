"""Environments of the package verifiers, each loaded in a process of its own: rows, conversation and reward.

Imports `runtime` and `areal_bus`; only `hosted.py` imports the package. Begin with `loading.py`.
"""
