"""Settings of verl, TRL and AReaL as ours: a TOML file, and a list of what has no counterpart.

Imports the settings of areal_bus only. Begin with `__main__.py`; each system has a module with its table of keys.
"""
