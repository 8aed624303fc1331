"""Alarms: rules that find a run that goes wrong. May import `areal_bus`, tools. Begin with `rules.py`."""
