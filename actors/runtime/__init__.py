"""Parts of every actor process: start, context, head session. Imports `areal_bus`; no torch. Begin with `start.py`."""
