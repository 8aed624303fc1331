"""Alarms: rules that find a run that goes wrong, from its journal and its samples.

May import `areal_bus` and other tools. Begin with `rules.py`.
"""
