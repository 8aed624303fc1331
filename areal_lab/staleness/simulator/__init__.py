"""Whole rings in one thread under a virtual clock, around the head and messages of production.

Imports `areal_bus` without sockets or torch. Everything random comes from one seed. Begin with `ring.py`.
"""
