"""Environments of the package verifiers, each loaded in a process of its own: rows, conversation and reward.

Imports `runtime` and `areal_bus`; only `hosted.py` and `client.py` import the package. Begin with `loading.py`.
"""
