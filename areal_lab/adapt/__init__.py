"""Compares a ring that adapts its split with fixed splits and with a clairvoyant schedule, in virtual time.

Imports `areal_bus` and `areal_lab.simulate`. Begin with `ring.py`.
"""
