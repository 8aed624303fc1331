"""The reward actor and the built-in rewards. Imports `runtime`, `areal_bus`; no torch. Begin with `actor.py`."""
