"""Benchmarks: our figures next to those of other systems; not in the wheel.

Imports everything. `python -m benchmarks --list` names them; each is `python -m benchmarks NAME`.
"""
