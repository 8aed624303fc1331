"""The head actor: carries out what `areal_bus.core.head` decides. Imports no torch. Begin with `shell.py`."""
