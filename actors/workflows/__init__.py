"""How a row becomes an episode. Imports `endpoint`, `engines`, `runtime`, `areal_bus`. Begin with `protocol.py`."""
