"""The generator actor. Imports `engines`, `workflows`, `models`, `runtime`, `areal_bus`. Begin with `loop.py`."""
